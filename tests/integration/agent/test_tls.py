"""Mutual TLS as Ray has it, alone and with the token: test_tls.py BIN_DIR

A real Ray head with our nodes and a gang over them; our head with Ray's tools and a node of Ray's.
Then those who do not fit: another CA, a certificate that has ended or is for elsewhere, a plain side
against one with TLS and the reverse, no token; heads whose certificate is such a one. Each ends by itself with one line that says what to do.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import commands  # noqa: E402
import grpc  # noqa: E402
from commands import GANG, RAY, TOKEN, check, clean_env, machine_ip, with_token  # noqa: E402
from ports import free_port  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_raylet import ray_node  # noqa: E402

BIN = sys.argv[1]


class Certificates:
    def __init__(self, folder, *addresses):
        self.dir = pathlib.Path(folder, "certs")
        subprocess.run([cluster.ROOT / "tests/make-certs", self.dir, *addresses],
                       check=True)

    def env(self, name="good", ca="ca"):
        return {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": f"{self.dir}/{name}.pem",
                "RAY_TLS_SERVER_KEY": f"{self.dir}/{name}.key",
                "RAY_TLS_CA_CERT": f"{self.dir}/{ca}.pem"}

    def credentials(self):
        ca, key, cert = ((self.dir / n).read_bytes() for n in ("ca.pem", "good.key", "good.pem"))
        return grpc.ssl_channel_credentials(ca, key, cert)


def call(env, *words):
    return commands.call({**clean_env(), "PATH": f"{BIN}:{os.environ['PATH']}", **env}, *words)


def is_refused(s, name, address, env, *says, flags=()):
    """The node ends by itself, and its last line says why."""
    node = s.node(BIN, "--address", address, "--node-ip-address", machine_ip(), *flags, env=env)
    code = node.process.wait(cluster.DEADLINE_S)
    last = node.log().strip().splitlines()[-1]
    check(name, (code, last), 77, *says)


def join(s, address, env, *flags):
    nodes = [s.node(BIN, "--address", address, "--node-ip-address", machine_ip(), "--node-name", n,
                    *flags, env=env) for n in ("one", "two")]
    for n in nodes:
        n.wait_alive()
    return nodes


def strangers(s, certs, address, flags=()):
    is_refused(s, "a plain node", address, {}, "speaks TLS: set RAY_USE_TLS=1",
               flags=[*flags, "--no-token"])
    is_refused(s, "a certificate of another CA", address, certs.env("other"),
               "refuses our certificate", "other.pem", "RAY_TLS_CA_CERT", flags=flags)
    is_refused(s, "a node that trusts another CA", address, certs.env("other", "other-ca"),
               f"the certificate of {address} is not of the CA in", "other-ca.pem", flags=flags)
    is_refused(s, "a certificate that has ended", address, certs.env("expired"),
               "expired.pem: the certificate expired on", flags=flags)
    is_refused(s, "a certificate for elsewhere", address, certs.env("elsewhere"),
               f"subjectAltName IP:{machine_ip()}", flags=flags)
    without_key = {**certs.env(), "RAY_TLS_SERVER_KEY": ""}
    node = s.node(BIN, "--address", address, env=without_key)
    assert node.process.wait(cluster.DEADLINE_S) == 64, node.log()
    assert "RAY_TLS_SERVER_KEY is not set" in node.log(), node.log()


def token_sources(s):
    """Where Ray itself looks: variable, file that a variable names, file of the user."""
    named, home = pathlib.Path(s.dir, "token"), pathlib.Path(s.dir, "home")
    own = home / ".ray/auth_token"
    own.parent.mkdir(parents=True)
    for path in named, own:
        path.write_text(f"{TOKEN}\n")
        path.chmod(0o600)
    return (("RAY_AUTH_TOKEN", {"RAY_AUTH_TOKEN": TOKEN}),
            ("RAY_AUTH_TOKEN_PATH", {"RAY_AUTH_TOKEN_PATH": str(named)}),
            ("the home", {"HOME": str(home)}))


def ray_heads(s, certs):
    with RayHead(env=certs.env()) as head:
        join(s, head.address, certs.env())
        check("a gang at a head with TLS",
              call(certs.env(), *GANG[:2], "--address", head.address, *GANG[2:]), 0,
              "this is rank 0", "this is rank 1")
        strangers(s, certs, head.address)
        check("a plain driver", call({}, *GANG[:2], "--address", head.address, *GANG[2:]), 77,
              "speaks TLS: set RAY_USE_TLS=1")
        check("a plain health check", call({}, "mobula", "health-check", "--address", head.address),
              1, "speaks TLS: set RAY_USE_TLS=1")
    both = {**certs.env(), **with_token()}
    with RayHead(env=both) as head:
        join(s, head.address, both)
        check("a gang at a head with TLS and a token",
              call(both, *GANG[:2], "--address", head.address, *GANG[2:]), 0,
              "this is rank 0", "this is rank 1")
        for name, source in token_sources(s):
            node = s.node(BIN, "--address", head.address, "--node-ip-address", machine_ip(),
                          "--node-name", name, env={**certs.env(), "HOME": s.dir, **source})
            node.wait_alive()
            assert node.stop() == 0
            print(f"ok   a node with the token of {name}", flush=True)
        is_refused(s, "no token", head.address, {**certs.env(), "HOME": s.dir}, "asks for a token")
        is_refused(s, "a wrong token", head.address, {**both, **with_token("wrong")},
                   "refuses the token given here")
        check("a wrong token, by its driver",
              call({**both, **with_token("wrong")}, *GANG[:2], "--address", head.address,
                   *GANG[2:]), 77, "refuses the token given here")


def own_head(s, certs):
    both = {**certs.env(), **with_token()}
    port = free_port()
    head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", str(port),
                  "--node-ip-address", machine_ip(), env=both)
    head.wait_alive()
    address = head.file()["gcs_address"]
    http = f"http://{machine_ip()}:{port}"
    gcs = cluster.Gcs(s, address, certs.credentials(),
                      [("authorization", f"Bearer {TOKEN}")])
    join(s, address, both)
    check("Ray's job at our head", call(both, RAY, "job", "submit", "--address", http, "--", *GANG),
          0, "this is rank 0", "this is rank 1")
    check("mobula's", call(both, "mobula", "job", "submit", "--address", http, "--", *GANG), 0)
    with ray_node(address, both):
        theirs = [h for h, n in gcs.nodes().items() if "CPU" in n.resources_total]
        assert len(theirs) == 1 and gcs.nodes()[theirs[0]].state == 0, gcs.nodes()
        check("ray status", call(both, RAY, "status", "--address", address), 0, theirs[0])
        check("ray list nodes", call(both, RAY, "list", "nodes", "--address", address), 0,
              theirs[0])
        print("ok   a node of Ray's", flush=True)
    strangers(s, certs, address, flags=["--node-name", "stranger"])
    channel = grpc.insecure_channel(head.grpc_address(), [("grpc.enable_http_proxy", 0)])
    try:
        s.unary(channel, "/grpc.health.v1.Health/Check",
                s.message("grpc.health.v1.HealthCheckRequest")(service=""), timeout=20)
        raise AssertionError("an agent's port answers without a certificate")
    except grpc.RpcError as e:
        assert e.code() == grpc.StatusCode.UNAVAILABLE, e


def tls_against_plain(s, certs):
    port = free_port()
    head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", str(port))
    head.wait_alive()
    address = head.file()["gcs_address"]
    is_refused(s, "a node with TLS at a plain head", address, certs.env(), "speaks no TLS",
               "unset RAY_USE_TLS")
    check("a driver with TLS at a plain head",
          call(certs.env(), *GANG[:2], "--address", address, *GANG[2:]), 77, "speaks no TLS")
    is_refused(s, "a node with TLS at an HTTP port", f"127.0.0.1:{port}", certs.env(), "speaks no TLS")


def odd_heads(s, certs):
    """The other direction: the certificate that does not fit is the head's."""
    for name, says in (("expired", "has expired: renew it there"),
                       ("elsewhere", f"is not for {machine_ip()}"), ("other", "is not of the CA in")):
        ca, key, cert = ((certs.dir / n).read_bytes() for n in ("ca.pem", f"{name}.key", f"{name}.pem"))
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        port = server.add_secure_port(f"{machine_ip()}:0", grpc.ssl_server_credentials([(key, cert)], ca, True))
        server.start()
        address = f"{machine_ip()}:{port}"
        is_refused(s, f"a head whose certificate is {name}.pem", address, certs.env(), address, says)
        server.stop(0).wait()


def main():
    with cluster.Sandbox() as s:
        certs = Certificates(s.dir, "127.0.0.1", machine_ip())
        ray_heads(s, certs)
        own_head(s, certs)
        tls_against_plain(s, certs)
        odd_heads(s, certs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

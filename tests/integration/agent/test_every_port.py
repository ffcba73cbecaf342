"""Every port of a node, and every caller that may be wrong: test_every_port.py BIN_DIR

Nodes at a real Ray head and our own head, with a token, with mutual TLS, with both. What listens is
what the kernel says that the node's processes listen on: a port that is not in HEAD_PORTS fails here. At
each one every method of our .proto files and every route of our sources is tried by callers without
a token, with a wrong one and the right one; without TLS, without a certificate, with one that another
CA signed, that has ended, that distrusts ours, and with a good one. Only what is in OPEN answers to
those who show nothing, and the node's log has a line for each kind of them.
"""

import http.client
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import commands  # noqa: E402
import grpc  # noqa: E402
import listening  # noqa: E402
from commands import RAY, TOKEN, check, clean_env, machine_ip, with_token  # noqa: E402
from test_job_agent import Head  # noqa: E402
from test_tls import Certificates  # noqa: E402

BIN = sys.argv[1]
IP = machine_ip()
WRONG_TOKEN = "s3cret-of-another-test"
GRPC, HTTP = "gRPC", "HTTP"
PORTS = {"grpc_port": GRPC, "http_port": HTTP}  # of node.json
HEAD_PORTS = {**PORTS, "gcs_address": GRPC, "dashboard_port": HTTP}
HEALTH = "/grpc.health.v1.Health/Check"
# HTTP without a token: health, and what Ray's dashboard leaves open, where its page asks for one.
OPEN = {"/api/healthz", "/api/local_raylet_healthz", "/api/gcs_healthz", "/-/healthz",
        "/api/authentication_mode", "/api/authenticate", "/", "/favicon.ico", "/static/{file*}"}
SAYS = {"no token": "it gives no token",
        "a wrong token": "it gives a wrong token",
        "no TLS": "it speaks no TLS",
        "no certificate": "it shows no certificate",
        "another CA": "its certificate is not of the CA in RAY_TLS_CA_CERT, or is not valid now",
        "an expired certificate":
            "its certificate is not of the CA in RAY_TLS_CA_CERT, or is not valid now"}


def routes():
    """(method, path, is open) of all tables of routes in the sources."""
    found = set()
    for path in (*cluster.ROOT.glob("agent/*.c"), *cluster.ROOT.glob("gcs/*.c")):
        for row in re.finditer(r'\{"([A-Z]+|\*)",\s*"(/[^"]*)",\s*\w+,\s*([A-Z0-9_| ]+)\}',
                               path.read_text()):
            found.add((row[1], row[2], "MB_HTTP_PUBLIC" in row[3]))
    assert len(found) > 30 and {p for _, p, is_open in found if is_open} == OPEN, found
    return sorted(found)


ROUTES = routes()


def methods(s):
    """All there are, whoever serves them."""
    names = [f"/{service.full_name}/{m.name}" for path in ("ray", "mobula")
             for proto in sorted((cluster.ROOT / "proto" / path).glob("*.proto"))
             for service in s.pool.FindFileByName(
                 str(proto.relative_to(cluster.ROOT))).services_by_name.values()
             for m in service.methods if service.full_name != "grpc.health.v1.Health"]
    assert len(names) > 50, names
    return [*names, "/mobula.v1.NodeAgent/NoSuchMethod"]


class Callers:
    def __init__(self, certs):
        self.certs = certs

    def credentials(self, ca="ca", name=None):
        read = {n: (self.certs.dir / n).read_bytes() for n in (f"{ca}.pem",)}
        if name:
            read |= {n: (self.certs.dir / n).read_bytes() for n in (f"{name}.pem", f"{name}.key")}
        return grpc.ssl_channel_credentials(read[f"{ca}.pem"], read.get(f"{name}.key"),
                                            read.get(f"{name}.pem"))

    def wrong_at_tls(self):
        return {"no TLS": None, "no certificate": self.credentials(),
                "another CA": self.credentials(name="other"),
                "an expired certificate": self.credentials(name="expired"),
                "distrust": self.credentials(ca="other-ca", name="good")}


def metadata(token):
    return [("authorization", f"Bearer {token}")] if token else []


def status(channel, method, token=None):
    """Of a call with an empty request; streams are opened in the same way on the wire."""
    try:
        channel.unary_unary(method)(b"", timeout=60, metadata=metadata(token))
        return "OK"
    except grpc.RpcError as e:
        return e.code().name


def dial(port, credentials):
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    at = f"{IP}:{port}"
    return grpc.secure_channel(at, credentials, options) if credentials \
        else grpc.insecure_channel(at, options)


def try_grpc(s, port, callers, has_token, has_tls):
    """Who was refused, of those in SAYS."""
    refused = []
    for name, credentials in callers.wrong_at_tls().items() if has_tls else ():
        with dial(port, credentials) as channel:
            for method in HEALTH, "/ray.rpc.NodeManagerService/GetResourceLoad":
                got = status(channel, method, TOKEN)
                assert got == "UNAVAILABLE", (port, name, method, got)
        if name in SAYS:  # who distrusts us hangs up, as anybody may
            refused.append(name)
    with dial(port, callers.credentials(name="good") if has_tls else None) as channel:
        for token in (None, WRONG_TOKEN) if has_token else ():
            got = {m: status(channel, m, token) for m in methods(s)}
            assert set(got.values()) == {"UNAUTHENTICATED"}, (port, token, got)
            refused.append("a wrong token" if token else "no token")
            assert status(channel, HEALTH, token) == "OK"
        assert status(channel, HEALTH, TOKEN) == "OK"
        served = [m for m in ("/ray.rpc.NodeManagerService/GetResourceLoad",
                              "/ray.rpc.NodeInfoGcsService/CheckAlive")
                  if status(channel, m, TOKEN) == "OK"]
        assert len(served) == 1, (port, served)
        assert status(channel, "/mobula.v1.NodeAgent/NoSuchMethod", TOKEN) == "UNIMPLEMENTED"
    return refused


def ask(port, method, path, token=None):
    connection = http.client.HTTPConnection(IP, port, timeout=60)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = re.sub(r"\{[^}]*\}", "x", path)
    connection.request("GET" if method == "*" else method, path, headers=headers)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def try_http(port, has_token):
    """Of a route that this port does not have it is not said, either."""
    for method, path, is_open in ROUTES if has_token else ():
        got = ask(port, method, path), ask(port, method, path, WRONG_TOKEN)
        is_ours = got == (401, 403)
        assert is_ours or (is_open and not {401, 403} & set(got)) or \
            (method == "POST" and path == "/api/authenticate"), (port, method, path, got)
    some = [path for method, path, _ in ROUTES if method == "GET" and
            ask(port, method, path, TOKEN) == 200]
    assert {"/metrics", "/api/version"} & set(some), some
    if not has_token:  # as Ray's: with TLS alone HTTP is plain. It shows, and starts nothing.
        for method, path, _ in ROUTES:
            got = ask(port, method, path)
            assert method in ("GET", "*") or got in (404, 405, 503), (port, method, path, got)
    return ["no token", "a wrong token"] if has_token else []


def try_node(s, node, callers, has_token, has_tls):
    """Every port of it."""
    known = {int(str(node.info[key]).rsplit(":", 1)[-1]): kind for key, kind in
             (HEAD_PORTS if node.info["is_head"] else PORTS).items()}
    there = listening.listens_on(listening.family(node.process.pid))
    assert set(there) == set(known), (there, node.info)
    assert "refused a caller" not in node.log(), node.log()
    began, refused = time.monotonic(), set()
    for port, kind in known.items():
        refused |= set(try_grpc(s, port, callers, has_token, has_tls) if kind == GRPC else
                       try_http(port, has_token))
    for name in refused:
        lines = cluster.wait_for(f"a line about {name}", lambda: [
            line for line in node.log().splitlines() if f": {SAYS[name]}" in line])
        # One for each port with a count of its own, again after a minute.
        most = len(known) * (1 + (time.monotonic() - began) // 60)
        assert all("refused a caller" in line for line in lines) and len(lines) <= most, lines
    for secret in TOKEN, WRONG_TOKEN:
        assert secret not in node.log()
    print(f"     {len(known)} ports; refused: {', '.join(sorted(refused))}", flush=True)


def at_ray(s, callers, env, has_token, has_tls):
    with Head(env=env) as head:
        flags = ["--address", head.address, "--node-ip-address", IP, "--num-gpus", "2"]
        nodes = [s.node(BIN, *flags, "--node-name", "one", env=env)]
        if has_token:  # it takes jobs over HTTP, which has no TLS
            nodes.append(s.node(BIN, *flags, "--job-agent", "--node-name", "jobs", env=env))
        gcs = cluster.Gcs(s, head.address, callers.credentials(name="good") if has_tls else None,
                          metadata(TOKEN if has_token else None))
        for node in nodes:
            node.wait_alive()
        pg = gcs.create_group([{"mobula_gpu": 2}] * len(nodes))
        gcs.wait_created(pg)  # Ray's own calls are right ones
        for node in nodes:
            try_node(s, node, callers, has_token, has_tls)
        gcs.remove_group(pg)
        for node in nodes:
            cluster.wait_for("its log of Ray's removal", lambda: "removed placement_group" in
                             node.log())
            assert node.stop() == 0
        refuse_to_join(s, head.address, callers, env, has_token, has_tls)


def refuse_to_join(s, address, callers, env, has_token, has_tls):
    """The other direction: what our node says of a head that it does not suit. One line, the last."""
    wrong = {}
    if has_token:
        wrong["no token"] = ({**env, "RAY_AUTH_TOKEN": "", "HOME": s.dir}, "asks for a token")
        wrong["a wrong token"] = ({**env, **with_token(WRONG_TOKEN)}, "refuses the token given here")
    if has_tls:
        plain = {k: v for k, v in env.items() if not k.startswith(("RAY_USE_TLS", "RAY_TLS"))}
        wrong |= {
            "no TLS": (plain, "speaks TLS: set RAY_USE_TLS=1"),
            "another CA": ({**env, **callers.certs.env("other")}, "refuses our certificate"),
            "distrust": ({**env, **callers.certs.env("good", "other-ca")}, "is not of the CA in"),
            "an expired certificate": ({**env, **callers.certs.env("expired")}, "expired on")}
    for name, (its_env, says) in wrong.items():
        flags = [] if "RAY_AUTH_TOKEN" in its_env and its_env["RAY_AUTH_TOKEN"] else ["--no-token"]
        node = s.node(BIN, "--address", address, "--node-ip-address", IP, *flags, env=its_env)
        assert node.process.wait(cluster.DEADLINE_S) == 77, node.log()
        assert says in node.log().strip().splitlines()[-1], (name, node.log())


def at_ours(s, callers, env, has_token, has_tls):
    """A head whose port others reach has a token, whatever it was given."""
    env = env if has_token else {**env, **with_token()}
    head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", "0", "--node-ip-address", IP,
                  "--dashboard-agent-listen-port", "0", "--num-gpus", "1", env=env)
    head.wait_alive()
    node = s.node(BIN, "--address", head.info["gcs_address"], "--node-ip-address", IP,
                  "--dashboard-agent-listen-port", "0", env=env)
    node.wait_alive()
    for n in head, node:
        try_node(s, n, callers, True, has_tls)
    check("Ray's list of nodes", commands.call({**clean_env(), **env}, RAY, "list", "nodes",
          "--address", f"http://{IP}:{head.info['dashboard_port']}"), 0, "ALIVE")
    assert node.stop() == 0 and head.stop() == 0


def main():
    with cluster.Sandbox() as s:
        callers = Callers(Certificates(s.dir, "127.0.0.1", IP))
        for name, env in (("a token", with_token()), ("TLS", callers.certs.env()),
                          ("TLS and a token", {**callers.certs.env(), **with_token()})):
            for where in at_ray, at_ours:
                where(s, callers, env, "RAY_AUTH_TOKEN" in env, "RAY_USE_TLS" in env)
                print(f"ok   {where.__name__}, {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

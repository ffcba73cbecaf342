"""Clusters with and without a token, as their users see them: test_token.py BIN_DIR

Two nodes of one machine; a job that is a gang over both, submitted by mobula and by Ray's own
command; then callers with no token and with a wrong one. The token stands in no log. First on
loopback with --token-file, then on the machine's own address with the token that the head makes,
and with --no-token; without any of these nothing listens beyond loopback.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import listening  # noqa: E402
from commands import GANG, RAY, TOKEN, call, check, clean_env, machine_ip, with_token  # noqa: E402
from ports import free_port  # noqa: E402

BARE = clean_env()


def alive_nodes(folder):
    nodes = [json.loads(p.read_text()) for p in pathlib.Path(folder).glob("*/node.json")]
    return [n for n in nodes if n["state"] == "ALIVE"]


def node_ports(folder):
    return listening.listens_on([n["pid_agent"] for n in alive_nodes(folder)])


def check_listens(folder, want):
    got = node_ports(folder)
    assert set().union(*got.values()) == {want}, got


def check_listens_as_ray(folder, ip):
    """Without a token HTTP is where Ray's agents have it, gRPC everywhere."""
    got, n_http = node_ports(folder), 0
    for node in alive_nodes(folder):
        for port in {node["http_port"], node.get("dashboard_port") or node["http_port"]}:
            assert got.pop(port) == {ip, "127.0.0.1"}, (port, got)
            n_http += 1
    assert n_http == 3 and set().union(*got.values()) == {"0.0.0.0"}, got


def no_secret_in_logs(folder, token):
    n_logs = 0
    for directory, _, names in os.walk(folder):  # in which the nodes make and remove files meanwhile
        for p in (pathlib.Path(directory, n) for n in names if n.endswith((".log", ".json"))):
            with contextlib.suppress(FileNotFoundError):
                assert token not in p.read_text(errors="replace"), f"{p} holds the token"
                n_logs += 1
    assert n_logs > 0
    print(f"ok   no token in {n_logs} logs", flush=True)


def run(mobula, folder):
    gcs, http = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    ports = ["--port", gcs.split(":")[1], "--dashboard-port", http.rsplit(":", 1)[1]]
    start = [mobula, "start", "--temp-dir", folder]
    own, wrong = clean_env(**with_token()), clean_env(**with_token("wrong"))

    # The path is relative: what runs elsewhere on the node must find the file all the same.
    check("a head", call(BARE, *start, "--head", *ports, "--token-file", "token", cwd=folder), 0)
    check("a second node, by its environment", call(own, *start, "--address", gcs, cwd=folder), 0)
    check("a third with a wrong token ends",
          call(wrong, *start, "--address", gcs, cwd=folder), 77)
    check("mobula's job", call(own, mobula, "job", "submit", "--address", http, "--", *GANG), 0)
    check("Ray's job", call(own, RAY, "job", "submit", "--address", http, "--", *GANG), 0)
    for name, env in ("no token", BARE), ("a wrong token", wrong):
        check(f"{name}: job list", call(env, mobula, "job", "list", "--address", http), 77)
        check(f"{name}: health-check", call(env, mobula, "health-check", "--address", gcs), 1)
    no_secret_in_logs(folder, TOKEN)
    check_listens(folder, "127.0.0.1")


class Cluster:
    """A head on a free port and its own HOME, so that no token of the user plays a part."""

    def __init__(self, mobula, folder, name, ip):
        self.mobula, self.ip = mobula, ip
        self.dir = pathlib.Path(folder, name)
        self.home = self.dir / "home"
        self.home.mkdir(parents=True)
        self.env = {**BARE, "HOME": str(self.home)}
        self.gcs, self.http = f"{ip}:{free_port()}", f"http://{ip}:{free_port()}"

    def start(self, *words, env=None):
        return call({**self.env, **(env or {})}, self.mobula, "start", "--temp-dir", self.dir / "t",
                    "--dashboard-agent-listen-port", "0", *words, cwd=self.dir)

    def start_head(self, *words, env=None):
        return self.start("--head", "--port", self.gcs.split(":")[1], "--dashboard-port",
                          self.http.rsplit(":", 1)[1], "--node-ip-address", self.ip, *words, env=env)

    def call(self, *words, env=None):
        return call({**self.env, **(env or {})}, *words)

    def stop(self):
        check("stop", self.call(self.mobula, "stop", "--temp-dir", self.dir / "t"), 0)


def made_at_the_first_start(mobula, folder):
    c = Cluster(mobula, folder, "made", machine_ip())
    stranger = {"HOME": str(c.dir)}
    path = c.home / ".ray/auth_token"

    check("a node without a token is refused before it asks", c.start("--address", c.gcs), 77,
          "~/.ray/auth_token", "--no-token")
    assert not path.exists()
    text = check("a head makes its token", c.start_head(), 0, str(path))
    token = path.read_text()
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600, path.stat()
    assert token not in text
    check("a second node with the same home", c.start("--address", c.gcs), 0)
    check_listens(c.dir / "t", "0.0.0.0")
    check("one with another home",
          c.start("--address", c.gcs, env=stranger), 77, "copy the head's ~/.ray/auth_token")
    check("one with a wrong token",
          c.start("--address", c.gcs, env={"RAY_AUTH_TOKEN": "wrong"}), 77,
          "refuses the token given here")
    check("one that trusts the network", c.start("--address", c.gcs, "--no-token"), 77,
          "asks for a token")
    check("mobula finds it", c.call(mobula, "status", "--address", c.http), 0, "nodes: 2")
    check("mobula's job",
          c.call(mobula, "job", "submit", "--address", c.http, "--", *GANG), 0, "rank 1")
    check("mobula without it", c.call(mobula, "job", "list", "--address", c.http, env=stranger), 77,
          "Missing authentication token", "copy the head's token file")
    ray = {"RAY_AUTH_MODE": "token"}
    check("Ray's job",
          c.call(RAY, "job", "submit", "--address", c.http, "--", *GANG, env=ray), 0, "rank 1")
    check("ray list nodes", c.call(RAY, "list", "nodes", "--address", c.http, env=ray), 0, "ALIVE")
    check("ray status", c.call(RAY, "status", "--address", c.gcs, env=ray), 0, "mobula_slot")
    check("Ray without RAY_AUTH_MODE", c.call(RAY, "job", "list", "--address", c.http), 1,
          "Authentication required: Unauthorized: Missing authentication token",
          "RAY_AUTH_MODE is currently 'disabled'")
    no_secret_in_logs(c.dir / "t", token)
    c.stop()
    check("the next head has the same", c.start_head(), 0, str(path))
    assert path.read_text() == token
    c.stop()


def a_trusted_network(mobula, folder):
    c = Cluster(mobula, folder, "open", machine_ip())
    gang = ["mobula", "run", "--num-nodes", "2", "--", "echo", "both"]

    check("an open head says so", c.start_head("--no-token"), 0, "WARNING", "WITHOUT a token")
    check("an open node says so", c.start("--address", c.gcs, env={"RAY_AUTH_MODE": "disabled"}), 0,
          "WARNING", "WITHOUT a token")
    check_listens_as_ray(c.dir / "t", c.ip)
    check("and status, too", c.call(mobula, "status", "--address", c.http), 0, "WARNING: no token",
          "nodes: 2")
    check("a gang over both", c.call(mobula, "job", "submit", "--address", c.http, "--", *gang), 0,
          "both")
    assert not (c.home / ".ray").exists()
    c.stop()
    check("both flags", c.start_head("--no-token", "--token-file", "x"), 64)


def nothing_is_said(mobula, folder):
    c = Cluster(mobula, folder, "loopback", "127.0.0.1")
    check("a head as it is", c.start_head(), 0)
    check("a node as it is", c.start("--address", c.gcs), 0)
    check_listens(c.dir / "t", "127.0.0.1")
    assert not (c.home / ".ray").exists()
    c.stop()


def main():
    mobula = pathlib.Path(sys.argv[1], "mobula")
    folder = tempfile.mkdtemp(prefix="mbtoken-")
    try:
        token = pathlib.Path(folder, "token")
        token.write_text(TOKEN + "\n")
        token.chmod(0o644)
        check("a token file that others may read",
              call(BARE, mobula, "start", "--temp-dir", folder, "--head", "--port", "0",
                   "--dashboard-port", "0", "--token-file", "token", cwd=folder), 77, "chmod 600")
        token.chmod(0o600)
        run(mobula, folder)
        for case in nothing_is_said, made_at_the_first_start, a_trusted_network:
            case(mobula, folder)
    except BaseException:
        for p in pathlib.Path(folder).rglob("agent.log"):
            print(f"--- {p}\n{p.read_text(errors='replace')[-4000:]}", flush=True)
        raise
    finally:
        stopped = call(BARE, mobula, "stop", "--temp-dir", folder)
        for name in "loopback", "made", "open":  # what a failed case left
            call(BARE, mobula, "stop", "--temp-dir", f"{folder}/{name}/t")
        shutil.rmtree(folder)
    check("stop", stopped, 0)


if __name__ == "__main__":
    main()

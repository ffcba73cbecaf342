"""A real redis-server, and a cluster of heads that share it."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from cluster import Cluster, kill_node, wait_until
from ports import free_port


class Redis:
    """Ours alone: a free port, a directory of its own; never the machine's service."""

    def __init__(self, *args):
        self.args = args
        self.dir = tempfile.mkdtemp(prefix="mb-redis-", dir="/tmp")
        self.port = free_port()
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()
        shutil.rmtree(self.dir, ignore_errors=True)

    def start(self):
        with open(f"{self.dir}/redis.log", "ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.dir,
                 "--save", "", "--appendonly", "yes", *self.args],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        wait_until(lambda: "NOAUTH" in (r := self.cli("ping", check=False)) or "PONG" in r,
                   "redis-server answers")

    def stop(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def monitored(self):
        """A function that gives what the server was told since the block began, a line each."""
        path = pathlib.Path(self.dir, "monitor")
        with open(path, "wb") as out:
            process = subprocess.Popen(["redis-cli", "-p", str(self.port), "monitor"], stdout=out, stderr=out,
                                       stdin=subprocess.DEVNULL)
        try:
            yield lambda: path.read_text(errors="replace")
        finally:
            process.kill()
            process.wait()

    def cli(self, *argv, check=True):
        done = subprocess.run(["redis-cli", "-p", str(self.port), *argv], text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0?prefix=test"


class SharedCluster(Cluster):
    """node-0 is the head, node-1 stands by; calls go to whatever `use()` says."""

    def __init__(self, redis, nodes=2, start_args=(), env=None):
        super().__init__(nodes=nodes, start_args=["--store", redis.url, *start_args], env=env)

    def start_node(self, index):
        done = self.mobula("start", "--head", "--temp-dir", self.temp, "--port", "0",
                           "--dashboard-port", "0", "--dashboard-agent-listen-port", "0",
                           "--node-name", f"node-{index}", *self._start_args,
                           timeout=self.START_TIMEOUT_S)
        assert done.returncode == 0, f"standby: {done.returncode}\n{done.stdout}"
        return done

    def use(self, name):
        node = self.node(name)
        self.gcs = node["gcs_address"]
        self.address = f"http://127.0.0.1:{node['dashboard_port']}"
        self.env["RAY_ADDRESS"] = self.gcs

    def call(self, method, path, body=None, raw=None):
        """A write that Redis is slow to take puts the lease in doubt: 503 is "ask again", and who
        waits for that answer uses call_once()."""
        return wait_until(
            lambda: (a := self.call_once(method, path, body, raw))[0] != 503 and a,
            lambda: self.call_once(method, path, body, raw), 60)

    def call_once(self, method, path, body=None, raw=None):
        return super().call(method, path, body, raw)

    def answers(self):
        try:
            return self.call_once("GET", "/api/jobs/")[0] == 200
        except (OSError, ValueError):
            return False

    def agent_log(self, name):
        return (pathlib.Path(self.node(name)["dir"]) / "agent.log").read_text(errors="replace")

    def kill(self, name):
        """As if the machine were gone: nothing of the node starts its agent again."""
        node = self.node(name)
        kill_node(node)
        return node

    @contextlib.contextmanager
    def hung(self, name):
        """The node's agent does not run, as if its machine hung."""
        pid = self.node(name)["pid_agent"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)

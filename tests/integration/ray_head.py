"""A real Ray head in a temporary directory, for as long as a `with` block lasts.

Run by the Python of an environment that has ray. Each part of the head gets a port of its own, which
nobody takes from it; it gets no dashboard and no resources. It is ended by signalling the process
that was started here and whatever of its session is left; never by `ray stop`, which would end every
Ray on the machine.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from ports import free_port


def ray_version():
    return tuple(int(n) for n in importlib.metadata.version("ray").split(".")[:2])


class RayHead:
    """`address` is the GCS's host:port; `temp_dir` holds the session directory and its logs;
    `agent_port` is the HTTP port of its own agent."""

    START_TIMEOUT_S = 240
    STOP_TIMEOUT_S = 20
    N_STARTS = 3  # Ray gives its raylet 30 s, which cannot be set; on a busy machine that is too short

    def __init__(self, env=None, args=(), block=True):
        """block: as one process that ends with any of Ray's; else they are on their own."""
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._env.update(env or {})
        self._args = (["--block"] if block else []) + list(args)
        self.temp_dir = None
        self.address = None
        self.agent_port = None
        self._process = None
        self._started = []

    def __enter__(self):
        for left in reversed(range(self.N_STARTS)):
            try:
                self._start()
                return self
            except RuntimeError as error:
                print(f"Ray itself did not come up, {left} more tries: {error}", flush=True)
                if left == 0:
                    raise

    def _start(self):
        self.temp_dir = tempfile.mkdtemp(prefix="mb-ray-", dir="/tmp")
        ray = pathlib.Path(sys.executable).parent / "ray"
        self.agent_port = free_port()
        command = [
            str(ray), "start", "--head", f"--port={free_port()}", "--num-cpus=0",
            "--node-ip-address=127.0.0.1", "--include-dashboard=false",
            *([] if ray_version() < (2, 60) else ["--include-log-monitor=false"]),
            "--disable-usage-stats",
            "--object-store-memory=80000000", f"--temp-dir={self.temp_dir}",
            f"--ray-client-server-port={free_port()}",
            f"--dashboard-agent-listen-port={self.agent_port}",
            f"--dashboard-agent-grpc-port={free_port()}",
            f"--runtime-env-agent-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            *self._args,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self.address = self._wait_started()
        except BaseException:
            self._print_logs()
            self._stop()
            raise

    def __exit__(self, kind, *_):
        try:
            if kind is not None:
                self._print_logs()
        finally:
            self._stop()

    def _print_logs(self):
        """What Ray said last: its directory goes with it."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                print(f"runs: {pid} {b' '.join(words)[:120].decode(errors='replace')}", flush=True)
        for name in ("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out",
                     "dashboard.log", "dashboard_agent.log"):
            path = pathlib.Path(self.temp_dir, "session_latest", "logs", name)
            if path.exists():
                print(f"--- {name}\n{path.read_text(errors='replace')[-3000:]}", flush=True)

    def _wait_started(self):
        deadline = time.monotonic() + self.START_TIMEOUT_S
        out = self._process.stdout.fileno()
        text = b""
        while b"Ray runtime started" not in text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                raise TimeoutError(f"ray start said only:\n{text.decode()}")
            part = os.read(out, 65536)
            if not part:
                raise RuntimeError(f"ray start ended:\n{text.decode()}")
            text += part
        # The address is part of the hint that is printed with it.
        while not (found := re.search(rb"address='([0-9.]+:[0-9]+)'", text)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                raise TimeoutError(f"no address in:\n{text.decode()}")
            text += os.read(out, 65536)
        return found.group(1).decode()

    def pids(self):
        """Live processes of our session, or working in our temporary directory."""
        pids = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            ours = int(stat[3]) == self._process.pid or self.temp_dir.encode() in words
            if ours and stat[0] not in "ZX":
                pids.append(int(entry.name))
        return pids

    def find(self, word):
        """The pid of the Ray process that was started with this word."""
        pids = []
        for pid in self.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(w.endswith(word.encode()) for w in words):
                    pids.append(pid)
        return min(pids)

    def kill(self, word):
        """SIGKILL to that process; what is returned starts it again with the same words."""
        pid = self.find(word)
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        env = dict(e.split(b"=", 1) for e in
                   pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in e)
        os.kill(pid, signal.SIGKILL)

        def start_again():
            process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
            self._started.append(process)
            return process

        return start_again

    def _signal_own(self, number):
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def _stop(self):
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=self.STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._signal_own(signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

"""A test_head_main process in a temporary directory, for as long as a `with` block lasts."""

import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile


class HeadProcess:
    """gcs (host:port), http (http://host:port), node_id; kill() and start() restart it in place."""

    def __init__(self, program, token=None):
        self.program = program
        self.token = token
        self.dir = None
        self.process = None

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="mb-head-", dir="/tmp")
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process and self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.dir, ignore_errors=True)

    def start(self):
        self.log = open(pathlib.Path(self.dir) / "head.log", "ab")
        command = [self.program, self.dir] + ([self.token] if self.token else [])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log)
        if not select.select([self.process.stdout], [], [], 120)[0]:
            raise TimeoutError("the head did not start: " + self.log_text())
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the head ended: " + self.log_text())
        ports = json.loads(line)
        self.gcs = f"127.0.0.1:{ports['gcs_port']}"
        self.http = f"http://127.0.0.1:{ports['http_port']}"
        self.http_port = ports["http_port"]
        self.node_id = ports["node_id"]

    def log_text(self):
        return (pathlib.Path(self.dir) / "head.log").read_text()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self.process.stdout.close()
        self.log.close()
        if status != 0:
            raise RuntimeError(f"the head ended with {status}: {self.log_text()}")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def clean_env(**extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env.update(RAY_DISABLE_IMPORT_WARNING="1", NO_COLOR="1", **extra)
    return env


class Checks:
    """Counts, and prints what failed; status() is the exit status."""

    def __init__(self):
        self.failed = self.passed = 0

    def equal(self, what, got, expected):
        good = got == expected
        self._say(good, what, f"got {got!r}, expected {expected!r}")

    def true(self, what, good, detail=""):
        self._say(bool(good), what, detail)

    def _say(self, good, what, detail):
        if good:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAIL {what}: {detail}", flush=True)

    def status(self):
        print(f"{self.passed} checks passed, {self.failed} failed")
        return 1 if self.failed else 0

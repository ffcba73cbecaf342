"""A server, a proxy in front of it, and `mobula checkpoint` that talks to the proxy: MOBULA KIND in argv.

KIND-https: with TLS on both sides of the proxy, and the bucket in the host's name."""

import contextlib
import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import servers
from faults import FaultProxy

MOBULA, KIND = sys.argv[1:3]
KIND, _, HOW = KIND.partition("-")
assert HOW in ("", "https"), HOW
del sys.argv[1:3]
MIB = 1 << 20
URL = f"s3://{servers.BUCKET}/run"
NAMES = ["a+b=c d.bin", "sub dir/ünï-码.bin", "zero", ".metadata", "100%&?#;:@$,.x"]


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-push-")))
        cls.certificates = servers.Certificates(cls.top) if HOW else None
        cls.proxy_port = servers.free_port()
        cls.server = cls.enterClassContext(servers.server(
            KIND, cls.top, certificates=cls.certificates, virtual=bool(HOW), virtual_port=HOW and cls.proxy_port))

    def setUp(self):
        self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="push-", dir=self.top)))
        tls = {"certificate": self.certificates.pair, "target_ca": self.certificates.ca} if HOW else {}
        self.proxy = self.enterContext(FaultProxy(self.server.port, port=self.proxy_port, **tls))
        self.url = f"{URL}-{self._testMethodName}"

    def env(self, **more):
        url = f"https://localhost:{self.proxy.port}" if HOW else f"http://127.0.0.1:{self.proxy.port}"
        return {**servers.clean_environment(), **self.server.environment(url), **more}

    def start(self, *args, limit_bytes=0, **more):
        """limit_bytes: no file may become larger, as on a disk that is full."""
        limit = ["prlimit", f"--fsize={limit_bytes}"] if limit_bytes else []
        return subprocess.Popen(limit + [MOBULA, "checkpoint", *map(str, args)], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env(**more))

    def mobula(self, *args, status=0, **more):
        process = self.start(*args, **more)
        out = process.communicate(timeout=200)[0]
        self.assertEqual(process.returncode, status, out)
        return out

    def on_a_terminal(self, *args):
        """All that is drawn there until it has ended well."""
        master, slave = pty.openpty()
        with contextlib.closing(os.fdopen(master, "rb", buffering=0)) as reader:
            process = subprocess.Popen([MOBULA, "checkpoint", *map(str, args)], env=self.env(), stdin=slave, stdout=slave,
                                       stderr=slave)
            os.close(slave)
            out = b""
            with contextlib.suppress(OSError):  # EIO: the other side is closed
                while data := reader.read(4096):
                    out += data
        self.assertEqual(process.wait(), 0, out)
        return out.decode()

    def checkpoint(self, iteration, files=None, name="ckpt"):
        """A directory as Megatron leaves it; files: name -> bytes."""
        top = self.dir / name
        for path, data in (files or {n: os.urandom(1000) if n != "zero" else b"" for n in NAMES}).items():
            at = top / f"iter_{iteration:07d}" / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(data)
        (top / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return top

    def journals(self, top):
        return list(top.glob(".mobula-push-*"))

    def interrupt(self, process, what, condition, left_s=2):
        """SIGINT when the condition holds: an orderly end, soon (1 s, and another for a machine that is busy)."""
        servers.wait_for(what, lambda: condition() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out = process.communicate(timeout=100)[0]
        took_s = time.monotonic() - began
        self.assertEqual(process.returncode, 130, out)
        self.assertLess(took_s, left_s, out)

    def cpu_seconds(self, process):
        fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read_bytes(self, process):
        """What it has read until now, of files above all."""
        with open(f"/proc/{process.pid}/io") as f:
            return int(next(line for line in f if line.startswith("rchar")).split()[1])

    def cpu_s(self, process):
        """What it has computed until now."""
        with open(f"/proc/{process.pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def open_uploads(self):
        """What the server still holds of unfinished uploads."""
        if KIND == "versitygw":
            top = self.server.root / servers.BUCKET / ".sgwtmp" / "multipart"
            return [p for p in top.glob("*/*") if p.is_dir()]
        return [p for p in (self.server.root / ".minio.sys/multipart").glob("*/*") if p.is_dir()]

"""Real S3 servers in a directory: versitygw and MinIO, plain or TLS, path or virtual-host addresses.

Programs: $MOBULA_VERSITYGW and $MOBULA_MINIO, or ~/.cache/mobula/bin/.
"""

import contextlib
import json
import os
import pathlib
import socket
import ssl
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
from faults import FaultProxy  # noqa: E402
from ports import free_port  # noqa: E402

KINDS = ("versitygw", "minio")
KINDS_AND_HOW = (*KINDS, *(f"{kind}-https" for kind in KINDS))  # -https: TLS, and the bucket in the host's name
BUCKET = "bucket"
ACCESS_KEY, SECRET_KEY = "testkey", "testsecret123"
START_TIMEOUT_S = 90  # for a machine that is busy with other things


def program(kind):
    path = os.environ.get(f"MOBULA_{kind.upper()}") or os.path.expanduser(f"~/.cache/mobula/bin/{kind}")
    if not os.access(path, os.X_OK):
        sys.exit(f"no S3 server {path}: tools/test builds it; MOBULA_{kind.upper()} names another one")
    return path


def listens(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what, condition, timeout_s=START_TIMEOUT_S):
    """Polls a real process from outside, with a deadline."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def _openssl(*args, cwd):
    subprocess.run(["openssl", *args], cwd=cwd, check=True, stdin=subprocess.DEVNULL, capture_output=True)


class Certificates:
    """An authority of our own and a certificate for localhost, 127.0.0.1 and the buckets' names."""

    def __init__(self, directory):
        self.dir = pathlib.Path(directory, "certificates")
        self.dir.mkdir()
        names = "DNS:localhost,DNS:bucket.localhost,DNS:other.localhost,DNS:missing.localhost,IP:127.0.0.1"
        (self.dir / "ext").write_text(f"subjectAltName={names}\n")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        _openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj",
                 "/CN=mobula test authority", cwd=self.dir)
        _openssl("req", *curve, "-keyout", "private.key", "-out", "server.csr", "-subj", "/CN=localhost", cwd=self.dir)
        _openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days",
                 "2", "-extfile", "ext", "-out", "public.crt", cwd=self.dir)
        # MinIO reads a directory with these two names and trusts everything else in its CAs folder.
        self.ca = str(self.dir / "ca.crt")
        self.pair = str(self.dir / "public.crt"), str(self.dir / "private.key")
        self.minio_dir = self.dir / "minio"
        self.minio_dir.mkdir()
        for name in "public.crt", "private.key":
            (self.minio_dir / name).write_bytes((self.dir / name).read_bytes())


class Server:
    """One server with BUCKET in it. stop() and start() are a restart with the same data."""

    def __init__(self, kind, directory, certificates=None, virtual=False, port=0, env=(), virtual_port=0):
        self.kind = kind
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=directory))
        self.root = self.dir / "data"  # of versitygw: the objects are plain files below root/BUCKET
        self.certificates = certificates
        self.virtual = virtual
        self.port = port or free_port()
        self.virtual_port = virtual_port or self.port  # that of a proxy, if clients name buckets at it
        self.extra_env = dict(env)
        self.process = None
        (self.root / BUCKET).mkdir(parents=True)
        if kind == "versitygw":
            (self.dir / "iam").mkdir()
        self.start()

    @property
    def url(self):
        return f"{'https' if self.certificates else 'http'}://{'localhost' if self.virtual else '127.0.0.1'}:{self.port}"

    def _command(self):
        address = f"127.0.0.1:{self.port}"
        if self.kind == "versitygw":
            command = [program("versitygw"), "--port", address, "--access", ACCESS_KEY, "--secret", SECRET_KEY,
                       "--keep-alive", "--iam-dir", str(self.dir / "iam")]
            if self.certificates:
                command += ["--cert", self.certificates.pair[0], "--key", self.certificates.pair[1]]
            if self.virtual:
                command += ["--virtual-domain", f"localhost:{self.virtual_port}"]
            return command + ["posix", str(self.root)]
        command = [program("minio"), "server", "--quiet", "--address", address]
        if self.certificates:
            command += ["--certs-dir", str(self.certificates.minio_dir)]
        return command + [str(self.root)]

    def start(self):
        env = dict(os.environ, **self.extra_env)
        if self.kind == "minio":
            env.update(MINIO_ROOT_USER=ACCESS_KEY, MINIO_ROOT_PASSWORD=SECRET_KEY, MINIO_BROWSER="off",
                       MINIO_CI_CD="1", MINIO_REGION="us-east-1", HOME=str(self.dir))
            if self.virtual:
                env["MINIO_DOMAIN"] = "localhost"
        with open(self.dir / "log", "ab") as log:
            self.process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, env=env)
        wait_for(f"{self.kind} answers", self.answers)

    def answers(self):
        if self.process.poll() is not None:
            raise AssertionError(f"{self.kind} ended: {(self.dir / 'log').read_text(errors='replace')[-2000:]}")
        path = b"/minio/health/ready" if self.kind == "minio" else b"/health"
        try:
            s = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        except OSError:
            return False
        try:
            with s:
                if self.certificates:
                    context = ssl.create_default_context(cafile=self.certificates.ca)
                    s = context.wrap_socket(s, server_hostname="localhost")
                s.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                answer = s.recv(100)
        except OSError:
            return False
        return b" 200 " in answer if self.kind == "minio" else answer.startswith(b"HTTP/1.1 ")

    def stop(self, kill=True):
        if self.process is None:
            return
        self.process.kill() if kill else self.process.terminate()
        self.process.wait()
        self.process = None

    def add_user(self, access, secret):
        """Of versitygw: a user who owns nothing."""
        subprocess.run([program("versitygw"), "admin", "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--endpoint-url",
                        self.url, "--allow-insecure", "create-user", "--access", access, "--secret", secret, "--role",
                        "user"], check=True, capture_output=True, env=clean_environment())

    def environment(self, url=None, **more):
        """What mobula's processes need to reach this server, or a proxy of it at url."""
        env = {"BUCKET_STORAGE_HOST": url or self.url, "BUCKET_STORAGE_ACCESS_KEY": ACCESS_KEY,
               "BUCKET_STORAGE_SECRET_KEY": SECRET_KEY, "NO_PROXY": "127.0.0.1,localhost"}
        if self.virtual:
            env["BUCKET_STORAGE_ADDRESSING_STYLE"] = "virtual"
        if self.certificates:
            env["AWS_CA_BUNDLE"] = self.certificates.ca
        env.update(more)
        return env

    def direct(self):
        """The same past a proxy: its address is the one that buckets are named at."""
        if self.virtual_port == self.port:
            return self.environment()
        return self.environment(f"{'https' if self.certificates else 'http'}://127.0.0.1:{self.port}",
                                BUCKET_STORAGE_ADDRESSING_STYLE="path")


@contextlib.contextmanager
def server(kind, directory, **options):
    s = Server(kind, directory, **options)
    try:
        yield s
    finally:
        s.stop()


def server_of(kind, directory, **options):
    """One of KINDS_AND_HOW."""
    kind, _, how = kind.partition("-")
    if how:
        options.update(certificates=Certificates(directory), virtual=True)
    return server(kind, directory, **options)


@contextlib.contextmanager
def behind_a_proxy(kind, directory):
    """One of KINDS_AND_HOW, a proxy in front of it that speaks as the server does, and what reaches that."""
    port = free_port()
    with server_of(kind, directory, virtual_port=port) as s:
        tls = {"certificate": s.certificates.pair, "target_ca": s.certificates.ca} if s.certificates else {}
        with FaultProxy(s.port, port=port, **tls) as proxy:
            yield s, proxy, s.environment(f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}")


def clean_environment():
    """This process's own, without anything that says where S3 is or who we are."""
    dropped = ("AWS_", "BUCKET_STORAGE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE",
               "http_proxy", "https_proxy", "all_proxy", "no_proxy")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


class Tool:
    """tests/integration/s3/store_tool.c: store operations one after the other."""

    def __init__(self, path, env, url=f"s3://{BUCKET}/p", **popen):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([path, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                        env={**clean_environment(), **env}, text=True, **popen)

    def send(self, op, **fields):
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"store_tool ended with {self.process.wait()}: {self.text()}")
        return json.loads(line)

    def __call__(self, op, **fields):
        """The answer, whatever it is."""
        self.send(op, **fields)
        return self.answer()

    def must(self, op, **fields):
        a = self(op, **fields)
        assert a["code"] == "OK", (op, fields, a, self.text()[-3000:])
        return a

    def fails(self, code, op, **fields):
        a = self(op, **fields)
        assert a["code"] == code, (op, fields, a, self.text()[-3000:])
        return a

    def text(self):
        """What it logged."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def close(self):
        self.process.stdin.close()
        status = self.process.wait(60)
        self.process.stdout.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.process.kill()
        status = self.close()
        log = self.text()
        self.log.close()
        if kind is None:
            assert status == 0, (status, log)

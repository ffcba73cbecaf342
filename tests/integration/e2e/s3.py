"""A real S3 server (versitygw) in a directory, and a proxy in front of it that can hold requests."""

import contextlib
import http.client
import http.server
import os
import pathlib
import re
import subprocess
import threading

from cluster import port_answers, wait_until
from ports import free_port

BUCKET = "checkpoints"
ACCESS_KEY, SECRET_KEY = "tester", "tester-secret"


def environment(port):
    """What mobula's processes need to reach the server at this port."""
    return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def server(directory):
    """versitygw with one bucket; yields its port."""
    program = os.environ.get("MOBULA_VERSITYGW", pathlib.Path.home() / ".cache/mobula/bin/versitygw")
    root = pathlib.Path(directory, "s3")
    (root / BUCKET).mkdir(parents=True)
    port = free_port()
    with open(pathlib.Path(directory, "versitygw.log"), "wb") as log:
        process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{port}", "--access", ACCESS_KEY, "--secret", SECRET_KEY,
             "posix", str(root)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: port_answers(port), "versitygw answers", 90)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Gate:
    """A reverse proxy. PUTs whose path matches `pattern` wait until open() and are then forwarded,
    unless their sender has gone away meanwhile. `acknowledged` lists the targets of PUTs, in order,
    whose success was sent back."""

    def __init__(self, target_port, pattern):
        self.acknowledged = []
        self.held = set()
        self.waiting = set()  # of the paths in held those that wait now
        self._pattern = re.compile(pattern)
        self._opened = threading.Event()
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.read_body()
                if self.command == "PUT" and gate._pattern.search(self.path):
                    gate.held.add(self.path)
                    gate.waiting.add(self.path)
                    gate._opened.wait(120)
                    gate.waiting.discard(self.path)
                    if self.sender_is_gone():
                        self.close_connection = True
                        return
                to = http.client.HTTPConnection("127.0.0.1", target_port, timeout=60)
                to.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("expect", "connection"):
                        to.putheader(name, value)
                to.endheaders(body)
                answer = to.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server",
                                            "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("content-length") if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(data)
                to.close()
                if self.command == "PUT" and answer.status // 100 == 2:
                    gate.acknowledged.append(self.path)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

            def read_body(self):
                if self.headers.get("transfer-encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("content-length") or 0))
                chunks = b""
                while True:
                    line = self.rfile.readline()
                    size = int(line.split(b";")[0], 16)
                    data = self.rfile.read(size)
                    chunks += line + data + self.rfile.readline()
                    if size == 0:
                        return chunks

            def sender_is_gone(self):
                self.connection.setblocking(False)
                try:
                    return self.connection.recv(1, 2) == b""  # MSG_PEEK
                except BlockingIOError:
                    return False
                except OSError:
                    return True
                finally:
                    self.connection.setblocking(True)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def open(self):
        self._opened.set()

    def shut(self):
        self._opened.clear()

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._opened.set()
        self._server.shutdown()
        self._server.server_close()

"""A web server with bad habits, for one `with` block."""

import http.server
import re
import ssl
import subprocess
import threading
import time


class Web:
    """Serves `files` (path -> bytes). Per path, `habits` may hold: drop (close the connection after so
    many bytes of each answer), ranges (False: they are ignored), etag, modified (None: not sent),
    length (False: neither length nor chunks), statuses (a list, one a request, then 200), to
    (redirection), delay_s. `requests` lists (path, Range or None)."""

    def __init__(self, chain=None):
        self.files, self.habits, self.requests = {}, {}, []
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                web.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None
        self.port = self.server.server_address[1]
        self.url = f"{'https' if chain else 'http'}://127.0.0.1:{self.port}"
        if chain:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*chain)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def answer(self, request):
        path = re.sub(r"^http://[^/]+|\?.*", "", request.path)  # absolute when asked as a proxy
        wanted = request.headers.get("Range")
        self.requests.append((path, wanted))
        habit = self.habits.get(path, {})
        time.sleep(habit.get("delay_s", 0))
        statuses = habit.get("statuses", [])
        status = statuses.pop(0) if statuses else 200 if path in self.files or "to" in habit else 404
        if status == 200 and "to" in habit:
            request.send_response(302)
            request.send_header("Location", habit["to"])
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if status != 200:
            request.send_response(status)
            request.send_header("Content-Length", "3")
            request.end_headers()
            request.wfile.write(b"no\n")
            return
        self.send(request, path, habit, wanted)

    def send(self, request, path, habit, wanted):
        data = self.files[path]
        first = 0
        if wanted and habit.get("ranges", True):
            first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        else:
            request.send_response(200)
        for name, value in (("ETag", habit.get("etag", '"one"')), ("Last-Modified", habit.get("modified"))):
            if value is not None:
                request.send_header(name, value() if callable(value) else value)
        if habit.get("length", True):
            request.send_header("Content-Length", str(len(data) - first))
        else:
            request.send_header("Connection", "close")
            request.close_connection = True
        request.end_headers()
        drop = habit.get("drop")
        request.wfile.write(data[first:first + drop] if drop else data[first:])
        if drop and first + drop < len(data):
            request.close_connection = True
            request.connection.shutdown(2)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def openssl(*argv):
    subprocess.run(["openssl", *map(str, argv)], stdin=subprocess.DEVNULL, check=True, capture_output=True)


def certificate(folder):
    """A server's chain and key for 127.0.0.1, and the certificate of the authority that signed it."""
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    ca, key, csr, pem, ext = (f"{folder}/{n}" for n in ("ca.pem", "server.key", "server.csr", "server.pem", "ext"))
    openssl("req", "-x509", *ec, "-days", "2", "-subj", "/CN=ours", "-keyout", ca + ".key", "-out", ca)
    openssl("req", *ec, "-subj", "/CN=server", "-keyout", key, "-out", csr)
    with open(ext, "w") as f:
        f.write("subjectAltName=IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", csr, "-CA", ca, "-CAkey", ca + ".key", "-CAcreateserial", "-days", "2",
            "-extfile", ext, "-out", pem)
    return (pem, key), ca

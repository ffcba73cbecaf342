"""An API server of a few objects, for what the real one does not do when it is asked: failing,
being slow, taking tokens back. HTTPS with the certificate of a pod's CA file, a service account's
directory as the kubelet makes it."""

import collections
import http.server
import json
import os
import pathlib
import re
import ssl
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
NAMESPACE = "team"
Request = collections.namedtuple("Request", "method path type body token time status")


def stamp(unix_s):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


class FakeApi:
    """`objects` is path -> object; `faults` are taken one a request: a status, or seconds of silence;
    `tokens` are those that count."""

    def __init__(self, directory):
        self.dir = pathlib.Path(directory)
        subprocess.run([ROOT / "tests/make-certs", self.dir / "certs", "127.0.0.1"], check=True)
        self.account = self.dir / "account"
        self.account.mkdir()
        (self.account / "namespace").write_text(NAMESPACE)
        (self.account / "ca.crt").write_bytes((self.dir / "certs/ca.pem").read_bytes())
        self.objects, self.faults, self.requests = {}, [], []
        self.lock = threading.Lock()
        self.tokens = set()
        self.new_token("first")

    def new_token(self, token):
        """As the kubelet does: the file is another one from one moment to the next."""
        path = self.account / "token.new"
        path.write_text(token)
        os.replace(path, self.account / "token")
        self.tokens = {token}

    def __enter__(self):
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do(self):
                api.answer(self)

            do_GET = do_PATCH = do_DELETE = do_POST = do_PUT = do

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_):
                """A client that hangs up, as one does that trusts another CA."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.dir / "certs/good.pem", self.dir / "certs/good.key")
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def environment(self, **more):
        return {"MOBULA_RAYJOB": "mini", "MOBULA_RAYJOB_LOOK_SECONDS": "1", "RAY_CLUSTER_NAME": "mini-abcde",
                "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port),
                "MOBULA_SERVICE_ACCOUNT_DIR": str(self.account), **more}

    # ---- objects ----

    def rayjob(self, **parts):
        """spec=, status=, metadata=: added to the RayJob that there is, or to a new one."""
        with self.lock:
            job = self.objects.setdefault(f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs/mini", {
                "apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "mini", "uid": "uid-1"}, "spec": {},
                "status": {"rayClusterName": "mini-abcde", "jobDeploymentStatus": "Running",
                           "startTime": stamp(time.time())}})
            for part, fields in parts.items():
                job[part].update(fields)

    def own(self, kind, name):
        self.objects[f"/api/v1/namespaces/{NAMESPACE}/{kind}/{name}"] = {"metadata": {"name": name}}

    def asked(self, method, status=200):
        return [r for r in list(self.requests) if r.method == method and r.status == status]

    # ---- requests ----

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        came = time.time()
        with self.lock:
            fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, float):
            time.sleep(fault)
            fault = None
        with self.lock:
            status, reply = (fault, {}) if fault else self.serve(handler.command, handler.path, token,
                                                                       handler.headers.get("Content-Type", ""))
            self.requests.append(Request(handler.command, handler.path, handler.headers.get("Content-Type"),
                                         json.loads(body) if body else None, token, came, status))
        if status >= 400:
            reply = {"kind": "Status", "message": f"made to fail with {status}"}
        text = json.dumps(reply).encode()
        try:
            handler.send_response(status)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)
        except OSError:  # it did not wait for this
            handler.close_connection = True

    def serve(self, method, path, token, body_type):
        if token not in self.tokens:
            return 401, {}
        if path not in self.objects:
            return 404, {}
        if "strategic" in body_type and re.match(r"/apis/[^/]*\.[^/]*(?<!\.k8s\.io)/", path):  # a custom resource
            return 415, {}
        return 200, self.objects[path] if method != "DELETE" else self.objects.pop(path)

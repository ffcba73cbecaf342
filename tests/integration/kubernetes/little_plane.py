"""An API server of a few kinds of objects in this process, for a run without the real one (control_plane.py), of which it has the methods.

It keeps what it is given without a look at it, merges patches, lets owners take along what they own, and gives pods their grace period.
HTTPS for pods, with the certificate of their CA file: the agent asks it as it asks the real one. Whoever has a token may do anything.
"""

import base64
import copy
import http.server
import json
import pathlib
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
import uuid

from control_plane import ROOT, ControlPlane
from fake_api import stamp

PATH = re.compile(r"/apis?/(?:[^/]+/)?v1(?:/namespaces/(?P<space>[^/]+))?/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status|binding|token))?")


def merge(into, patch):
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            into[key] = merge(into[key] if isinstance(into.get(key), dict) else {}, value)
        else:
            into[key] = value
    return into


class LittlePlane:
    path, create, ok, PLACES = ControlPlane.path, ControlPlane.create, ControlPlane.ok, ControlPlane.PLACES

    def __init__(self, address):
        self.address, self.objects, self.lock = address, {}, threading.RLock()

    def __enter__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="mb-plane-"))
        subprocess.run([ROOT / "tests/make-certs", self.dir / "pki", self.address], check=True)
        plane = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code, reply = plane.call(self.command, self.path, json.loads(body) if body else None)
                text = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PATCH = do_DELETE = do_POST = do

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True  # a pod that is killed may leave its connection

            def handle_error(self, *_):
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.dir / "pki/good.pem", self.dir / "pki/good.key")
        self.server = Server((self.address, 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        shutil.rmtree(self.dir)

    def token(self, namespace, account):
        return f"{namespace}-{account}"

    def call(self, method, path, body=None, **_):
        """(status, object)"""
        path, _, query = path.partition("?")
        place = PATH.fullmatch(path)
        if place is None:
            return 404, {"message": f"no such path: {path}"}
        with self.lock:
            code, reply = self.serve(method, place["kind"], place["name"], place["part"], copy.deepcopy(body), query)
            return code, copy.deepcopy(reply)

    def serve(self, method, kind, name, part, body, query):
        if method == "GET" and name is None:
            words = query.partition("labelSelector=")[2]
            labels = dict(word.split("=") for word in words.split(",")) if words else {}
            return 200, {"items": [o for (k, _), o in self.objects.items()
                                   if k == kind and labels.items() <= o["metadata"].get("labels", {}).items()]}
        if method == "POST" and part is None:
            return self.add(kind, body)
        obj = self.objects.get((kind, name))
        if obj is None:
            return 404, {"message": f"no {kind} {name}"}
        if part == "binding":
            obj["spec"]["nodeName"] = body["target"]["name"]
        elif method == "PATCH":
            merge(obj, body)
            if "deletionTimestamp" in obj["metadata"] and kind != "pods" and not obj["metadata"].get("finalizers"):
                self.remove(kind, name)
        elif method == "DELETE":
            if (body or {}).get("preconditions", {}).get("uid", obj["metadata"]["uid"]) != obj["metadata"]["uid"]:
                return 409, {"message": "another uid"}
            self.delete(kind, name, obj, now=(body or {}).get("gracePeriodSeconds") == 0)
        return 200, obj

    def add(self, kind, obj):
        meta = obj["metadata"]
        meta.setdefault("name", meta.get("generateName", "") + uuid.uuid4().hex[:5])
        if (kind, meta["name"]) in self.objects:
            return 409, {"message": f"{kind} {meta['name']} is there"}
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=stamp(0))
        if kind == "secrets":
            text = obj.pop("stringData", {})
            obj["data"] = {**obj.get("data", {}), **{k: base64.b64encode(v.encode()).decode() for k, v in text.items()}}
        elif kind == "pods":
            obj["status"] = {"phase": "Pending"}
            self.mount_token(obj["spec"])
        self.objects[kind, meta["name"]] = obj
        return 201, obj

    def mount_token(self, spec):
        """As the API server does, unless the pod wants none."""
        spec.setdefault("serviceAccountName", "default")
        if spec.get("automountServiceAccountToken", True):
            spec["volumes"].append({"name": "kube-api-access", "projected": {}})
            for c in [*spec.get("initContainers", []), *spec["containers"]]:
                c.setdefault("volumeMounts", []).append(
                    {"name": "kube-api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"})

    def delete(self, kind, name, obj, now):
        if kind == "pods" and not now:
            obj["metadata"].update(deletionTimestamp=stamp(0), deletionGracePeriodSeconds=obj["spec"].get("terminationGracePeriodSeconds", 30))
        elif obj["metadata"].get("finalizers"):
            obj["metadata"].setdefault("deletionTimestamp", stamp(0))
        else:
            self.remove(kind, name)

    def remove(self, kind, name):
        uid = self.objects.pop((kind, name))["metadata"]["uid"]
        for (k, n), o in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in o["metadata"].get("ownerReferences", [])):
                self.delete(k, n, o, now=False)

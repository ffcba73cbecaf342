"""A real etcd, kube-apiserver and kube-controller-manager, for as long as a `with` block lasts.

All three are one program (control-plane/main.go, built by tools/lib/peers.sh). Ports are the kernel's,
data and keys lie in a temporary directory, and nothing of it is left. There is no kubelet: pods and
claims are objects only.
"""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
START_S = 120  # on a machine that does ten other things; it takes 3 to 13 s


def free_ports(n):
    """Of the kernel; somebody may take one before we do, then the start fails and is tried again."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def wait_for(look, what, timeout_s=START_S):
    end = time.monotonic() + timeout_s
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what() if callable(what) else what}")
        time.sleep(0.1)


class ControlPlane:
    ADMISSION = "OwnerReferencesPermissionEnforcement"  # as OpenShift has it: the stricter one

    def __init__(self, program, address="127.0.0.1"):
        self.program, self.address = program, address

    def __enter__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="mb-kcp-"))
        self.processes = []
        try:
            self.make_keys()
            for attempt in range(3):
                try:
                    self.start()
                    break
                except ChildProcessError:
                    self.stop()
                    if attempt == 2:
                        raise
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        shutil.rmtree(self.dir)

    def stop(self):
        for p in reversed(self.processes):
            p.send_signal(signal.SIGKILL)
            p.wait()
        self.processes.clear()
        shutil.rmtree(self.dir / "etcd", ignore_errors=True)

    def make_keys(self):
        subprocess.run([ROOT / "tests/make-certs", self.dir / "pki", self.address], check=True)
        for words in (["genrsa", "-out", "sa.key", "2048"], ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]):
            subprocess.run(["openssl", *words], cwd=self.dir / "pki", check=True, capture_output=True)
        (self.dir / "tokens.csv").write_text('admin,admin,admin,"system:masters"\n')

    def run(self, part, *flags):
        with open(self.dir / f"{part}.log", "wb") as log:
            # Also when a runner kills us for being late.
            p = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", self.program, part, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                 cwd=self.dir, env={**os.environ, "TMPDIR": str(self.dir)})
        self.processes.append(p)

    def log(self, part):
        return (self.dir / f"{part}.log").read_text(errors="replace")

    def check_alive(self):
        for p in self.processes:
            if p.poll() is not None:
                part = p.args[4]
                raise ChildProcessError(f"{part} ended with {p.returncode}:\n{self.log(part)[-3000:]}")

    def start(self):
        etcd, peer, self.port = free_ports(3)
        pki, client, between = self.dir / "pki", f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self.run("etcd", "--data-dir", str(self.dir / "etcd"), "--listen-client-urls", client, "--advertise-client-urls",
                 client, "--listen-peer-urls", between, "--initial-advertise-peer-urls", between, "--initial-cluster",
                 f"default={between}", "--unsafe-no-fsync", "--log-level", "error")
        self.run("apiserver", f"--etcd-servers={client}", f"--bind-address={self.address}", f"--secure-port={self.port}",
                 f"--tls-cert-file={pki}/good.pem", f"--tls-private-key-file={pki}/good.key", f"--cert-dir={self.dir}",
                 f"--token-auth-file={self.dir}/tokens.csv", "--authorization-mode=RBAC", "--anonymous-auth=false",
                 "--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://mobula.test",
                 f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key",
                 f"--enable-admission-plugins={self.ADMISSION}", "--endpoint-reconciler-type=none",
                 "--allow-privileged=true")
        wait_for(self.is_ready, lambda: f"the API server:\n{self.log('apiserver')[-3000:]}")
        (self.dir / "kubeconfig").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "m",
            "clusters": [{"name": "m", "cluster": {"server": f"https://{self.address}:{self.port}",
                                                   "certificate-authority": f"{pki}/ca.pem"}}],
            "users": [{"name": "a", "user": {"token": "admin"}}],
            "contexts": [{"name": "m", "context": {"cluster": "m", "user": "a"}}]}))
        self.run("controller-manager", f"--kubeconfig={self.dir}/kubeconfig", "--leader-elect=false", "--secure-port=0",
                 f"--service-account-private-key-file={pki}/sa.key", f"--root-ca-file={pki}/ca.pem",
                 "--controllers=garbage-collector-controller,namespace-controller,serviceaccount-controller,"
                 "root-ca-certificate-publisher-controller,persistentvolumeclaim-protection-controller,job-controller")

    def is_ready(self):
        self.check_alive()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/readyz", raw=True)[0] == 200

    # ---- requests ----

    def call(self, method, path, body=None, token="admin", kind="application/json", raw=False):
        """(status, object)"""
        context = ssl.create_default_context(cafile=self.dir / "pki/ca.pem")
        c = http.client.HTTPSConnection(self.address, self.port, context=context, timeout=60)
        with contextlib.closing(c):
            c.request(method, path, None if body is None else json.dumps(body),
                      {"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": "application/json"})
            reply = c.getresponse()
            text = reply.read()
            return reply.status, text if raw else json.loads(text)

    def ok(self, method, path, body=None, **more):
        status, reply = self.call(method, path, body, **more)
        assert 200 <= status < 300, f"{method} {path}: {status} {reply.get('message')}"
        return reply

    PLACES = {"Job": ("/apis/batch/v1", "jobs"), "RayJob": ("/apis/ray.io/v1", "rayjobs"), "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
              "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
              "ServiceAccount": ("/api/v1", "serviceaccounts"), "ConfigMap": ("/api/v1", "configmaps"), "Service": ("/api/v1", "services"),
              "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"), "Pod": ("/api/v1", "pods"), "Secret": ("/api/v1", "secrets"),
              "RayCluster": ("/apis/ray.io/v1", "rayclusters"),
              "PodMonitor": ("/apis/monitoring.coreos.com/v1", "podmonitors")}

    def path(self, kind, namespace, name=None):
        root, plural = self.PLACES[kind]
        return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, doc, namespace, dry=False, **more):
        """With every field checked: a misspelt one is refused."""
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry else "")
        doc = {**doc, "metadata": {**doc["metadata"], "namespace": namespace}}
        return self.call("POST", self.path(doc["kind"], namespace) + query, doc, **more)

    def namespace(self, name):
        self.ok("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        wait_for(lambda: self.call("GET", self.path("ServiceAccount", name, "default"))[0] == 200, "its account")

    def define(self, crd):
        self.ok("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        group, version, plural = crd["spec"]["group"], crd["spec"]["versions"][0]["name"], crd["spec"]["names"]["plural"]
        wait_for(lambda: self.call("GET", f"/apis/{group}/{version}/{plural}", raw=True)[0] == 200, f"{plural} to be served")

    def token(self, namespace, account):
        reply = self.ok("POST", self.path("ServiceAccount", namespace, account) + "/token",
                        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                         "spec": {"expirationSeconds": 3600}})
        return reply["status"]["token"]

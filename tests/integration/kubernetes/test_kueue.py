"""The chart's jobs under a real Kueue, on a real API server with KubeRay's definitions: Kueue's manager with its own webhooks, which every
RayJob goes through, its scheduler, quota, priorities and topology. The operator's part of a RayJob's status is written by the test.

Needs the control plane and the Kueue that `tools/test --all` builds, helm, and KubeRay's CRDs; root, for mounts and a network of its own.

    test_kueue.py [Kueue.test_a_gang_is_let_in_as_a_whole]
"""

import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import unittest

import kubelet
import namespaces
import test_chart as chart
import test_clouds as clouds
from control_plane import ControlPlane, wait_for

PROGRAM = os.environ.get("MOBULA_CONTROL_PLANE") or next(
    (str(p) for p in sorted((chart.CACHE / "bin").glob("control-plane-*"))), "")
KUEUE = pathlib.Path(os.environ.get("MOBULA_KUEUE") or next((str(p) for p in sorted(chart.CACHE.glob("kueue-v*[0-9]"))), "/none"))
CRDS = next((p for p in chart.CRDS if (p / "ray.io_rayjobs.yaml").exists()), None)
NAMESPACE, GROUP = "team", "/apis/kueue.x-k8s.io/v1beta2"
HEALTH, METRICS, WEBHOOKS = 8081, 8443, 9443
GPU, BLOCK, HOST = "nvidia.com/gpu", "cloud.google.com/gce-topology-block", "kubernetes.io/hostname"
NODES, NODE = 2, {"cpu": "208", "memory": "1800Gi", GPU: "8", "pods": "110", "vpc.amazonaws.com/efa": "32"}
GANG = chart.merged(chart.SMALL, chart.NVIDIA, {"workers": {"replicas": 2, "resources": {"gpu": 8}}})  # all that the queues have


class Manager:
    """Kueue's manager: its definitions, its own webhooks, and the process."""

    def __init__(self, plane, directory):
        self.plane, self.dir, self.process = plane, directory, None

    def __enter__(self):
        crds = [chart.load(path.read_text()) for path in sorted((KUEUE / "crds").glob("*.yaml"))]
        for crd in crds:
            self.plane.define(crd)
        kinds = {c["spec"]["names"]["plural"] for c in crds if any(v["name"] == "v1beta2" for v in c["spec"]["versions"])}
        wait_for(lambda: kinds <= {r["name"] for r in self.plane.ok("GET", GROUP)["resources"]}, "Kueue's kinds to be served")
        # Where it looks for the certificate of its metrics cannot be set; /etc is this test's own.
        overlay = pathlib.Path("/mnt/etc")
        (overlay / "upper/kueue/metrics/certs").mkdir(parents=True)
        (overlay / "work").mkdir()
        self.certs = self.dir / "webhook-certs"
        self.certs.mkdir()
        for folder in self.certs, overlay / "upper/kueue/metrics/certs":
            shutil.copy(self.plane.dir / "pki/good.pem", folder / "tls.crt")
            shutil.copy(self.plane.dir / "pki/good.key", folder / "tls.key")
        subprocess.run(["mount", "-t", "overlay", "etc", "-o", f"lowerdir=/etc,upperdir={overlay}/upper,workdir={overlay}/work", "/etc"], check=True)
        config = self.dir / "kueue.json"
        config.write_text(json.dumps({
            "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH}"},
            "metrics": {"bindAddress": f"127.0.0.1:{METRICS}"}, "webhook": {"host": self.plane.address, "port": WEBHOOKS, "certDir": str(self.certs)},
            "leaderElection": {"leaderElect": False}, "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["ray.io/rayjob"]}, "featureGates": {"VisibilityOnDemand": False}}))
        with open(self.dir / "kueue.log", "wb") as log:
            self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", KUEUE / "kueue", f"--config={config}",
                                             f"--kubeconfig={self.plane.dir}/kubeconfig"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(self.is_ready, lambda: f"Kueue:\n{self.log()[-3000:]}")
        self.register()
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def log(self):
        return (self.dir / "kueue.log").read_text(errors="replace")

    def is_ready(self):
        assert self.process.poll() is None, self.log()[-3000:]
        try:
            c = http.client.HTTPConnection("127.0.0.1", HEALTH, timeout=5)
            c.request("GET", "/readyz")
            return c.getresponse().status == 200
        except OSError:
            return False

    def register(self):
        """Its webhooks as it ships them, for its own objects and for RayJobs; by URL, since there are no Services here."""
        authority = subprocess.run(["base64", "-w0", self.plane.dir / "pki/ca.pem"], capture_output=True, text=True, check=True).stdout
        for doc in chart.load_all((KUEUE / "webhooks.yaml").read_text()):
            doc["webhooks"] = [w for w in doc["webhooks"] if w["clientConfig"]["service"]["path"].endswith("-ray-io-v1-rayjob") or
                               "-kueue-x-k8s-io-" in w["clientConfig"]["service"]["path"]]
            for webhook in doc["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                webhook["clientConfig"] = {"url": f"https://{self.plane.address}:{WEBHOOKS}{path}", "caBundle": authority}
            plural = doc["kind"].lower() + "s"
            self.plane.ok("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", doc)


def setUpModule():
    kubelet.make_network()
    plane = Kueue.plane = unittest.enterModuleContext(ControlPlane(PROGRAM, kubelet.GATEWAY))
    for kind in ("rayjobs", "rayclusters"):
        plane.define(chart.load((CRDS / f"ray.io_{kind}.yaml").read_text()))
    plane.namespace(NAMESPACE)
    Kueue.manager = unittest.enterModuleContext(Manager(plane, plane.dir))
    for i in range(NODES):
        name = f"node-{i}"
        plane.ok("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {
            HOST: name, BLOCK: "block-0", "cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}}})
        plane.ok("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"allocatable": NODE, "capacity": NODE, "conditions": [
            {"type": "Ready", "status": "True"}]}}, kind="application/merge-patch+json")
        # Every new node has a taint until the controller of nodes, which does not run here, sees it ready.
        plane.ok("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, kind="application/merge-patch+json")
    for plural, doc in [
        ("topologies", {"kind": "Topology", "metadata": {"name": "blocks"}, "spec": {"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": HOST}]}}),
        ("resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": "any"}}),
        ("resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": "a3"}, "spec": {
            "nodeLabels": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, "topologyName": "blocks"}}),
        ("workloadpriorityclasses", {"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 1000}),
    ]:
        plane.ok("POST", f"{GROUP}/{plural}", {"apiVersion": "kueue.x-k8s.io/v1beta2", **doc})


class Kueue(unittest.TestCase):
    def setUp(self):
        self.queue = self._testMethodName.removeprefix("test_").replace("_", "-")[:20].strip("-")
        self.made = []

    def tearDown(self):
        """The quota is each test's own; its jobs go, that nothing of them is looked at any more."""
        for name in self.made:
            self.plane.call("DELETE", self.plane.path("RayJob", NAMESPACE, name))

    # ---- what a cluster's owner makes ----

    def make_queue(self, flavor="any", name=None):
        name = name or self.queue
        quota = [{"name": r, "nominalQuota": str(NODES * int(NODE[r].removesuffix("Gi"))) + ("Gi" if r == "memory" else "")}
                 for r in ("cpu", "memory", GPU)]
        for path, doc in [
            (f"{GROUP}/clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": {
                "namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"}, "resourceGroups": [
                    {"coveredResources": [q["name"] for q in quota], "flavors": [{"name": flavor, "resources": quota}]}]}}),
            (f"{GROUP}/namespaces/{NAMESPACE}/localqueues", {"kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": name}}),
        ]:
            self.plane.ok("POST", path, {"apiVersion": "kueue.x-k8s.io/v1beta2", **doc})

    # ---- what a user does ----

    def submit(self, name, *parts):
        """`helm template NAME charts/mobula ... | kubectl apply -f -`"""
        done = chart.helm(chart.merged(GANG, {"queue": {"scheduler": "kueue", "name": self.queue}}, *parts), "--namespace", NAMESPACE, name=name)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.create(chart.job_in(chart.load_all(done.stdout)))

    def create(self, job):
        code, reply = self.plane.create(job, NAMESPACE)
        self.assertEqual(code, 201, reply)
        self.made.append(job["metadata"]["name"])

    # ---- what is seen ----

    def job(self, name):
        return self.plane.ok("GET", self.plane.path("RayJob", NAMESPACE, name))

    def is_suspended(self, name):
        return self.job(name)["spec"].get("suspend", False)

    def workload(self, name):
        """The one that Kueue made of a RayJob, or None."""
        items = self.plane.ok("GET", f"{GROUP}/namespaces/{NAMESPACE}/workloads")["items"]
        return next((w for w in items if any(o["name"] == name for o in w["metadata"]["ownerReferences"])), None)

    def has(self, name, condition, status="True"):
        found = (self.workload(name) or {}).get("status", {}).get("conditions", [])
        return any(c["type"] == condition and c["status"] == status for c in found)

    def wait(self, look, name):
        wait_for(look, lambda: f"{name}: suspended {self.is_suspended(name)}, {(self.workload(name) or {}).get('status')}\n"
                               f"{self.manager.log()[-3000:]}", 60)

    def wait_let_in(self, name):
        self.wait(lambda: self.has(name, "Admitted") and not self.is_suspended(name), name)

    def operator_says(self, name, **status):
        self.plane.ok("PATCH", self.plane.path("RayJob", NAMESPACE, name) + "/status", {"status": status}, kind="application/merge-patch+json")

    # ---- the tests ----

    def test_a_gang_is_let_in_as_a_whole(self):
        """All its pods or none, by what they ask for; a second one waits until the first has ended."""
        self.make_queue()
        self.submit("first")
        self.wait_let_in("first")
        workload = self.workload("first")
        self.assertEqual([(p["name"], p.get("count", 1)) for p in workload["spec"]["podSets"]], [("head", 1), ("workers", 1)])
        used = [a["resourceUsage"][GPU] for a in workload["status"]["admission"]["podSetAssignments"]]
        self.assertEqual(used, ["8", "8"])
        self.operator_says("first", jobDeploymentStatus="Running", jobStatus="RUNNING")
        self.submit("second")
        self.wait(lambda: self.has("second", "QuotaReserved", "False"), "second")
        self.assertTrue(self.is_suspended("second"))
        self.operator_says("first", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", endTime="2026-01-01T00:00:00Z")
        self.wait(lambda: self.has("first", "Finished"), "first")
        self.wait_let_in("second")

    def test_a_pod_that_submits(self):
        """In K8sJobMode the submitter's pod is counted too; it asks for no GPU."""
        self.make_queue()
        self.submit("by-a-pod", {"job": {"submissionMode": "K8sJobMode"}})
        self.wait_let_in("by-a-pod")
        usage = {a["name"]: a["resourceUsage"].get(GPU) for a in self.workload("by-a-pod")["status"]["admission"]["podSetAssignments"]}
        self.assertEqual(len(usage), 3, usage)
        self.assertEqual(sorted(usage.values(), key=str), ["8", "8", None])

    def test_preempted(self):
        """By a job of a higher class: suspended, which is what the head's agent looks for; it is let in again afterwards."""
        self.make_queue()
        self.submit("low")
        self.wait_let_in("low")
        self.operator_says("low", jobDeploymentStatus="Running", jobStatus="RUNNING")
        self.submit("high", {"queue": {"priorityClass": "urgent"}})
        self.wait(lambda: self.is_suspended("low"), "low")
        self.operator_says("low", jobDeploymentStatus="Suspended", jobStatus="")
        self.wait_let_in("high")
        self.operator_says("high", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", endTime="2026-01-01T00:00:00Z")
        self.wait_let_in("low")

    def test_its_time_is_over(self):
        """queue.maxExecSeconds: it is suspended, and not let in again."""
        self.make_queue()
        self.submit("bounded", {"queue": {"maxExecSeconds": 3}})
        self.wait_let_in("bounded")
        self.operator_says("bounded", jobDeploymentStatus="Running", jobStatus="RUNNING")
        self.wait(lambda: self.is_suspended("bounded"), "bounded")
        self.assertFalse(self.workload("bounded")["spec"]["active"])

    def test_topology(self):
        """The override for GKE as it is: its pods are placed in one block, each on a node."""
        self.make_queue(flavor="a3", name="a3-queue")
        job = chart.job_in(chart.documents(chart.CHART / "overrides/values-gke-a3-tcpx-kueue.yaml", name="gke"))
        self.create(job)
        self.wait_let_in("gke")
        hosts = []
        for assignment in self.workload("gke")["status"]["admission"]["podSetAssignments"]:
            topology = assignment["topologyAssignment"]
            self.assertIn(HOST, topology["levels"])
            hosts.append(json.dumps(topology["slices"]))
        self.assertEqual(len(hosts), 2)
        self.assertEqual({f"node-{i}" for i in range(NODES) for h in hosts if f"node-{i}" in h}, {"node-0", "node-1"})

    def test_values_of_the_nemo_chart(self):
        """A queue's name alone."""
        self.make_queue()
        self.create(chart.job_in(chart.render(clouds.yaml.safe_load(clouds.NEMO), {"queue": self.queue}, name="nemo")))
        self.wait_let_in("nemo")

    def test_what_it_refuses(self):
        """What the chart makes without Kueue, and never with it: deletion rules instead of the end of the cluster."""
        self.make_queue()
        job = chart.job_in(chart.render(GANG, name="rules"))
        self.assertIn("deletionStrategy", job["spec"])
        job["metadata"].setdefault("labels", {})["kueue.x-k8s.io/queue-name"] = self.queue
        code, reply = self.plane.create(job, NAMESPACE)
        self.assertGreaterEqual(code, 400, reply)
        self.assertIn("a kueue managed job should delete the cluster after finishing", reply["message"])


if __name__ == "__main__":
    missing = [w for w, is_there in (("a control plane", PROGRAM), ("a Kueue", (KUEUE / "kueue").exists()), ("KubeRay's definitions", CRDS)) if not is_there]
    why = f"no {' and no '.join(missing)}, which tools/test --all builds" if missing else namespaces.enter()
    if why:
        print(f"skipped: {why}")
        sys.exit(77)
    subprocess.run(["mount", "-t", "tmpfs", "mnt", "/mnt"], check=True)
    unittest.main()

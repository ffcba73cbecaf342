"""The chart and the agent on a real API server with KubeRay's definitions and a real controller manager.

Needs the control plane that `tools/test --all` builds, helm, and KubeRay's CRDs ($KUBERAY_CRDS, or
shared/data/kuberay-crds beside the checkout); without them nothing is tried, which is counted as a skip.
"""

import os
import pathlib
import sys
import tempfile
import time
import unittest

import yaml

import kuberay_pods
import podmonitor
import test_chart as chart
import test_clouds as clouds
import test_pods as pods
from control_plane import ControlPlane, wait_for
from e2e.cluster import Cluster
from fake_api import stamp

PROGRAM = os.environ.get("MOBULA_CONTROL_PLANE") or next(
    (str(p) for p in sorted((chart.CACHE / "bin").glob("control-plane-*"))), "")
CRDS = next((p for p in chart.CRDS if (p / "ray.io_rayjobs.yaml").exists()), None)
OWNED = chart.merged(chart.SMALL, chart.Render.MONITORED, {"runTensorboard": True, "checkpoint": {"url": "s3://bucket/run"}, "files": {"train.py": "print(1)\n"}, "storage": {"ephemeral": {
    "storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "quantity": "1Gi"}}})
MERGE = "application/strategic-merge-patch+json"


def head_env(docs):
    """What the chart writes into the head's pod, as text."""
    pod, *_ = chart.pods_of(chart.job_in(docs))
    return {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"].startswith("MOBULA_")
            and "value" in e}


def setUpModule():
    plane = Case.plane = unittest.enterModuleContext(ControlPlane(PROGRAM))
    for crd in ("ray.io_rayjobs.yaml", "ray.io_rayclusters.yaml"):
        plane.define(chart.load((CRDS / crd).read_text()))
    plane.define(podmonitor.CRD)
    plane.namespace("team")
    plane.namespace("empty")  # nothing is ever kept there
    print("Kubernetes", plane.ok("GET", "/version")["gitVersion"], flush=True)


class Case(unittest.TestCase):

    def install(self, name, *parts):
        done = chart.helm(chart.merged(OWNED, *parts), "--namespace", "team", name=name)
        self.assertEqual(done.returncode, 0, done.stderr)
        docs = chart.load_all(done.stdout)
        for doc in docs:
            status, reply = self.plane.create(doc, "team")
            self.assertEqual(status, 201, reply)
        return docs

    def objects(self, docs):
        """(kind, name) of all but the RayJob."""
        return [(d["kind"], d["metadata"]["name"]) for d in docs if d["kind"] != "RayJob"]

    def get(self, kind, name):
        status, reply = self.plane.call("GET", self.plane.path(kind, "team", name))
        return reply if status == 200 else None

    def set_status(self, name, **fields):
        """As the operator does."""
        path = self.plane.path("RayJob", "team", name) + "/status"
        self.plane.ok("PATCH", path, {"status": fields}, kind="application/merge-patch+json")


class Validation(Case):
    def check(self, docs, what):
        for doc in docs:
            if doc["kind"] == "KaiwoJob":  # whose definition is not at hand
                doc = chart.rayjob_of(doc)
            status, reply = self.plane.create(doc, "empty", dry=True)
            self.assertEqual(status, 201, f"{what}: {doc['kind']}: {reply.get('message')}")

    def test_every_override(self):
        existing = sorted((chart.EXISTING / "overrides").glob("*.yaml"))
        files = [[f] for f in chart.OVERRIDES + existing] + [[chart.OVERRIDES[0], *chart.KAIWO]]
        files += [[chart.CHART / "overrides/values-eks-p5-efa-gpt3.yaml", f] for f in chart.PREPARE]
        for f in files:
            with self.subTest(files=f):
                self.check(chart.documents(*f), f)

    def test_other_values(self):
        for values in [*chart.Conform.CASES, OWNED, {"head": {"kind": "ray", "image": "ray:1"}, "job": {
                "submissionMode": "SidecarMode"}}, {"serviceAccount": {"annotations": {"a": "b"}}}]:
            with self.subTest(values=values):
                self.check(chart.render(chart.SMALL, values), values)

    def test_what_clouds_add(self):
        nemo = yaml.safe_load(clouds.NEMO)
        for values in [nemo, chart.merged(nemo, {"queue": "team", "volumes": {"nfsMountPath": "/nfs"}, "workload": {
                "embeddedTensorboardTarget": "/nfs/x"}}),
                *({**chart.SMALL, "network": {"preset": preset}, "workers": {"resources": {"extra": {"vpc.amazonaws.com/efa": 4}}},
                   "runTensorboard": True} for preset in ("rdma", "efa", "tcpx")),
                {**chart.SMALL, "head": {"kind": "ray", "image": "ray:1"}, "runTensorboard": True, "checkpoint": {"url": "s3://b/p"},
                 "job": {"runtimeEnv": {"env_vars": {"A": "b"}}}, "queue": {"scheduler": "kueue", "name": "q", "maxExecSeconds": 60}}]:
            with self.subTest(values=values):
                self.check(chart.render(values), values)

    def test_the_pods_of_it(self):
        """As KubeRay makes them: volumes, names and mounts fit together, which the definition of a RayJob does not ask."""
        for what, job in pods.rendered():
            for pod in kuberay_pods.pods(chart.rayjob_of(job), "mini-abcde", "empty"):
                for key in ("serviceAccountName", "priorityClassName"):  # which have to be there first
                    pod["spec"].pop(key, None)
                with self.subTest(what=what, pod=pod["metadata"]["generateName"]):
                    status, reply = self.plane.create(pod, "empty", dry=True)
                    self.assertEqual(status, 201, reply.get("message"))
            if chart.rayjob_of(job)["spec"]["submissionMode"] == "K8sJobMode":
                with self.subTest(what=what, job="of the submitter"):
                    submitter = kuberay_pods.submitter_job(chart.rayjob_of(job), "mini-abcde", "mini-fghij", "head:8265")
                    status, reply = self.plane.create(submitter, "empty", dry=True)
                    self.assertEqual(status, 201, reply.get("message"))

    def test_a_wrong_field_is_seen(self):
        job = chart.job_in(chart.render(chart.SMALL))
        job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containerz"] = []
        status, reply = self.plane.create(job, "empty", dry=True)
        self.assertEqual(status, 400)
        self.assertIn("containerz", reply["message"])


class Permissions(Case):
    def test_what_it_must_and_nothing_else(self):
        self.install("mini")
        self.install("other")
        token = self.plane.token("team", "mini")
        core, ray, rbac = "/api/v1/namespaces/team", "/apis/ray.io/v1/namespaces/team", \
            "/apis/rbac.authorization.k8s.io/v1/namespaces/team"
        monitoring = "/apis/monitoring.coreos.com/v1/namespaces/team"
        label = {"metadata": {"labels": {"a": "b"}}}
        more = {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}
        for method, path, body, want in [
            ("GET", f"{ray}/rayjobs/mini", None, 200),
            ("GET", f"{ray}/rayjobs/other", None, 403),
            ("GET", f"{ray}/rayjobs", None, 403),
            ("PATCH", f"{ray}/rayjobs/mini", label, 403),
            ("PATCH", f"{ray}/rayjobs/mini/status", label, 403),
            ("DELETE", f"{ray}/rayjobs/other", None, 403),
            ("GET", f"{ray}/rayclusters/mini", None, 403),
            ("PATCH", f"{core}/configmaps/mini-files", label, 200),
            ("PATCH", f"{core}/configmaps/other-files", label, 403),
            ("GET", f"{core}/configmaps/mini-files", None, 403),
            ("PATCH", f"{core}/persistentvolumeclaims/mini", label, 200),
            ("PATCH", f"{core}/persistentvolumeclaims/other", label, 403),
            ("DELETE", f"{core}/persistentvolumeclaims/other", None, 403),
            ("PATCH", f"{core}/services/mini-tensorboard", label, 200),
            ("PATCH", f"{core}/services/other-tensorboard", label, 403),
            ("PATCH", f"{core}/serviceaccounts/other", label, 403),
            ("POST", f"{core}/serviceaccounts/mini/token", {"spec": {}}, 403),
            ("PATCH", f"{monitoring}/podmonitors/mini", label, 200),
            ("PATCH", f"{monitoring}/podmonitors/other", label, 403),
            ("GET", f"{monitoring}/podmonitors/mini", None, 403),
            ("PATCH", f"{rbac}/roles/other", label, 403),
            ("PATCH", f"{rbac}/roles/mini", more, 403),  # it would give itself more than it has
            ("PATCH", f"{rbac}/rolebindings/other", label, 403),
            ("GET", f"{core}/secrets", None, 403),
            ("GET", f"{core}/secrets/minio-credentials", None, 403),
            ("GET", f"{core}/pods", None, 403),
            ("POST", f"{core}/pods", {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}, 403),
            ("GET", "/api/v1/nodes", None, 403),
        ]:
            with self.subTest(method=method, path=path):
                kind = MERGE if method == "PATCH" and not path.startswith((ray, monitoring)) else \
                    "application/merge-patch+json" if method == "PATCH" else "application/json"
                status, reply = self.plane.call(method, path, body, token=token, kind=kind)
                self.assertEqual(status, want, reply.get("message"))


class Agent(Case):
    def pod(self, docs, name, **more):
        """A node with what the head's pod has: the chart's environment, the account's files."""
        account = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-account-")))
        (account / "namespace").write_text("team")
        (account / "ca.crt").write_bytes((self.plane.dir / "pki/ca.pem").read_bytes())
        (account / "token").write_text(self.plane.token("team", name))
        env = {**head_env(docs), "RAY_CLUSTER_NAME": f"{name}-abcde", "MOBULA_SERVICE_ACCOUNT_DIR": str(account),
               "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.plane.port),
               "MOBULA_RAYJOB_LOOK_SECONDS": "1", **more}
        env.pop("MOBULA_INPUT_DIR")
        return Cluster(nodes=1, env=env)

    def log(self, cluster):
        return (cluster.node("node-0")["dir"] / "agent.log").read_text(errors="replace")

    def wait_log(self, cluster, text):
        wait_for(lambda: text in self.log(cluster), lambda: f"{text!r} in:\n{self.log(cluster)}")

    def owners(self, kind, name):
        return self.get(kind, name)["metadata"].get("ownerReferences", [])

    def test_a_whole_life(self):
        """Owners, deadline, end: the agent deletes the RayJob, the controller manager all that it owns."""
        docs = self.install("life", {"job": {"ttlSecondsAfterFinished": 3, "activeDeadlineSeconds": 100000}})
        uid = self.get("RayJob", "life")["metadata"]["uid"]
        self.set_status("life", startTime=stamp(time.time()), rayClusterName="life-abcde", jobDeploymentStatus="Running")
        self.assertEqual(len(self.objects(docs)), 7)
        with self.pod(docs, "life") as cluster:
            self.wait_log(cluster, "the RayJob's active deadline in_s=99")
            owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "life", "uid": uid}
            for kind, name in self.objects(docs):
                wait_for(lambda kind=kind, name=name: self.owners(kind, name), lambda: f"{kind}:\n{self.log(cluster)}")
                self.assertEqual(self.owners(kind, name), [owner])
            wait_for(lambda: self.log(cluster).count("life: owns") == 7, lambda: self.log(cluster))  # it has the answers
            node = cluster.node("node-0")
            versions = {o: self.get(*o)["metadata"]["resourceVersion"] for o in self.objects(docs)}
            os.kill(node["pid_agent"], 9)  # the next one does it again, which is the same
            wait_for(lambda: self.log(cluster).count("life: owns") == 14, lambda: self.log(cluster))
            for o, version in versions.items():
                self.assertEqual(self.get(*o)["metadata"]["resourceVersion"], version)
            ended = int(time.time())
            self.set_status("life", jobDeploymentStatus="Complete", endTime=stamp(ended))
            wait_for(lambda: self.get("RayJob", "life") is None, lambda: self.log(cluster))
            self.assertGreaterEqual(time.time(), ended + 3)
            for kind, name in self.objects(docs):
                wait_for(lambda kind=kind, name=name: self.get(kind, name) is None, f"{kind} {name} is collected")

    def test_deleted_by_hand(self):
        """With the owners set, whoever deletes the RayJob deletes all."""
        docs = self.install("hand", {"job": {"agentDeletes": False}})
        with self.pod(docs, "hand") as cluster:
            for kind, name in self.objects(docs):
                wait_for(lambda kind=kind, name=name: self.owners(kind, name), lambda: f"{kind}:\n{self.log(cluster)}")
            self.plane.ok("DELETE", self.plane.path("RayJob", "team", "hand"))
            for kind, name in self.objects(docs):
                wait_for(lambda kind=kind, name=name: self.get(kind, name) is None, f"{kind} {name} is collected")

    def test_without_a_role(self):
        """Said, and nothing else is the worse for it."""
        docs = self.install("bare", {"rbac": {"create": False}})
        with self.pod(docs, "bare") as cluster:
            self.wait_log(cluster, 'User "system:serviceaccount:team:bare" cannot get resource "rayjobs"')
            cluster.submit("true", submission_id="works")
            self.assertEqual(cluster.wait_job("works", timeout_s=300)["status"], "SUCCEEDED")
        self.assertIsNotNone(self.get("RayJob", "bare"))


if __name__ == "__main__":
    for there, text in ((PROGRAM, "no control plane in the cache: tools/test --all builds it"),
                        (CRDS, "KubeRay's definitions are not here: set KUBERAY_CRDS to the folder crd/bases of a KubeRay release")):
        if not there:
            print(f"skipped: {text}")
            sys.exit(77)
    unittest.main()

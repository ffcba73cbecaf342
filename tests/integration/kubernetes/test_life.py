"""The chart's jobs, lived through: a real API server and controller manager, an operator by KubeRay's rules, pods that are real
processes, a real S3 server. Two nodes with two ranks each train without GPUs, and end in every way that there is.

What is counted is iterations that were trained, by the ranks' own logs, and are not in the store: docs/kubernetes.md, "Which way to die costs what".

    test_life.py [Life.test_a_normal_end]
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import yaml

import kubelet
import namespaces
import test_chart as chart
from control_plane import ControlPlane, wait_for
from kuberay_operator import Operator, seconds_of
from little_plane import LittlePlane

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / d) for d in ("e2e", "s3")]
import s3  # noqa: E402
from cluster import MOBULA, ITERATION  # noqa: E402
from faults import FaultProxy  # noqa: E402

PROGRAM = os.environ.get("MOBULA_CONTROL_PLANE") or next(
    (str(p) for p in sorted((chart.CACHE / "bin").glob("control-plane-*"))), "")
CRDS = next((p for p in chart.CRDS if (p / "ray.io_rayjobs.yaml").exists()), None)
SMOKE = yaml.safe_load((chart.CHART / "overrides/values-cpu-smoke.yaml").read_text())
ENDLESS = 1_000_000
INTERVAL = 20  # iterations between two saves
RAY_IMAGE = "registry.example/ray-mobula"  # of a real Ray head: the environment that this runs in, and mobula
NAMESPACE = "team"


def any_object(kind):
    """A definition that takes whatever there is, where KubeRay's own are not at hand."""
    plural = kind.lower() + "s"
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"{plural}.ray.io"}, "spec": {
        "group": "ray.io", "scope": "Namespaced", "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
        "versions": [{"name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
                      "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}}


def setUpModule():
    Life.dir = pathlib.Path(unittest.enterModuleContext(tempfile.TemporaryDirectory(prefix="mb-life-")))
    kubelet.make_network()
    port = unittest.enterModuleContext(s3.server(Life.dir))
    Life.proxy = unittest.enterModuleContext(FaultProxy(port, host=kubelet.GATEWAY))
    if not PROGRAM:
        print("without a real control plane, which tools/test --all builds: a little one instead", flush=True)
    plane = Life.plane = unittest.enterModuleContext(
        ControlPlane(PROGRAM, kubelet.GATEWAY) if PROGRAM else LittlePlane(kubelet.GATEWAY))
    if PROGRAM:
        for kind in ("RayJob", "RayCluster"):
            plane.define(chart.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text()) if CRDS else any_object(kind))
        if not CRDS:
            print("without KubeRay's definitions: the API server takes any RayJob", flush=True)
        plane.namespace(NAMESPACE)
    secret = {"minio-access-key": s3.ACCESS_KEY, "minio-secret-key": s3.SECRET_KEY}
    plane.ok("POST", plane.path("Secret", NAMESPACE), {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "minio-credentials"},
                                                     "stringData": secret})
    Life.kubelet = unittest.enterModuleContext(kubelet.Kubelet(plane, Life.dir, MOBULA, {RAY_IMAGE: f"{pathlib.Path(sys.executable).parent}:"}))
    Life.operator = unittest.enterModuleContext(Operator(plane, NAMESPACE))


class Life(unittest.TestCase):
    def setUp(self):
        self.name = self._testMethodName.removeprefix("test_").replace("_", "-")[:30]
        self.bucket = self.dir / "s3" / s3.BUCKET / self.name
        self.first_pod, self.first_stop, self.first_post = len(self.kubelet.pods), len(self.operator.stops), len(self.operator.posts)
        print(f"\n---- {self.name}", flush=True)

    def tearDown(self):
        """Failed or not, nothing of it is left for the next one."""
        outcome = self._outcome.result
        if any(test is self for test, _ in outcome.failures + outcome.errors):
            for pod in self.pods():
                print(f"---- {pod.name}", pod.log()[-3000:], sep="\n")
                for path in sorted(pod.dir.rglob("*.log")):
                    print(f"---- {path}", path.read_text(errors="replace")[-2000:], sep="\n")
        if self.rayjob():
            self.delete()
        wait_for(lambda: not self.left(), lambda: f"left: {self.left()}")
        self.assertIsNone(self.kubelet.fault)
        self.assertIsNone(self.operator.fault)

    # ---- the job ----

    def apply(self, iterations, job=None, interval=INTERVAL, batch=8, **more):
        """`helm template NAME charts/mobula ... | kubectl apply -f -`"""
        arguments = ["--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 255",
                     "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64",
                     f"--micro-batch-size 2 --global-batch-size {batch} --train-iters {iterations} --lr 1e-3 --lr-decay-iters 1000 --eval-iters 1",
                     f"--eval-interval {ENDLESS} --log-interval 1 --save /local_resources/checkpoints --save-interval {interval}"]
        values = chart.merged(SMOKE, {
            "remoteCheckpointsPath": f"{s3.BUCKET}/{self.name}", "megatronArguments": arguments, "workers": {"cpuRanks": 2, "env": {
                "OPENBLAS_NUM_THREADS": "1", "MOBULA_RAYJOB_LOOK_SECONDS": "1"}},
            "logistics": {"envVars": {"BUCKET_STORAGE_HOST": f"http://{kubelet.GATEWAY}:{self.proxy.port}"}},
            "job": {"activeDeadlineSeconds": 0, "terminationGracePeriodSeconds": 60, **(job or {})}}, more)
        done = chart.helm(values, "--namespace", NAMESPACE, name=self.name)
        self.assertEqual(done.returncode, 0, done.stderr)
        for doc in chart.load_all(done.stdout):
            code, reply = self.plane.create(doc, NAMESPACE)
            self.assertEqual(code, 201, reply)

    def rayjob(self):
        code, job = self.plane.call("GET", self.plane.path("RayJob", NAMESPACE, self.name))
        return job if code == 200 else None

    def status(self):
        return (self.rayjob() or {}).get("status", {})

    def wait_state(self, *states, timeout_s=120):
        wait_for(lambda: self.status().get("jobDeploymentStatus", "") in states, lambda: f"{states}: {self.status()}", timeout_s)
        return self.status()

    def patch(self, spec):
        self.plane.ok("PATCH", self.plane.path("RayJob", NAMESPACE, self.name), {"spec": spec}, kind="application/merge-patch+json")

    def delete(self):
        self.plane.ok("DELETE", self.plane.path("RayJob", NAMESPACE, self.name))

    def left(self):
        """Objects of the job, and pods that still end."""
        found = [p.name for p in self.kubelet.live_pods()]
        for kind in ("RayJob", "RayCluster", "Pod", "Job", "Service", "Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"):
            items = self.plane.ok("GET", self.plane.path(kind, NAMESPACE))["items"]
            found += [f"{kind} {i['metadata']['name']}" for i in items if i["metadata"]["name"].startswith(self.name)]
        return found

    # ---- its pods ----

    def pods(self, role="", live=False):
        """Of this test, the oldest first; role: head or worker."""
        return [p for p in self.kubelet.pods[self.first_pod:] if f"-{role}" in p.name[len(self.name) + 6:] and not (live and p.gone.is_set())]

    def submitters(self):
        """Pods of the Job in K8sJobMode."""
        return [p for p in self.kubelet.pods[self.first_pod:] if p.object["metadata"]["labels"].get("batch.kubernetes.io/job-name") == self.name]

    def rank_logs(self, pods=None):
        return "".join(path.read_text(errors="replace") for pod in pods or self.pods() for path in sorted(pod.dir.glob("*/tmp/**/rank-*.log")))

    def trained(self, pods=None):
        """The newest iteration that any rank has said."""
        return max((int(i) for i, _, _ in ITERATION.findall(self.rank_logs(pods))), default=0)

    def saved(self, pods=None):
        return max(map(int, re.findall(r"successfully saved checkpoint from iteration +(\d+)", self.rank_logs(pods))), default=0)

    def went_on_from(self, pods):
        """What a later attempt has loaded."""
        return [int(i) for i in re.findall(r"successfully loaded checkpoint from .* at iteration +(\d+)", self.rank_logs(pods))]

    def durable(self):
        """What `latest` of the store names, 0 before there is any."""
        path = self.bucket / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0

    def verify(self):
        """Every byte of it, by the manifest's checksums."""
        done = subprocess.run([MOBULA, "checkpoint", "verify", f"s3://{s3.BUCKET}/{self.name}"], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **s3.environment(self.proxy.port), "AWS_ENDPOINT_URL": f"http://{kubelet.GATEWAY}:{self.proxy.port}"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def wait_durable(self, iteration, timeout_s=120):
        wait_for(lambda: self.durable() >= iteration, lambda: f"{iteration} durable; it is {self.durable()}, {self.status()}", timeout_s)

    def wait_later_attempt(self, pods, timeout_s=120):
        """Trains again, on these pods among others: the iteration that it began with."""
        wait_for(lambda: self.went_on_from(pods()), lambda: f"another attempt: {self.status()}", timeout_s)
        found = set(self.went_on_from(pods()))
        self.assertEqual(len(found), 1, found)
        return found.pop()

    def rank_pids(self, pod):
        container, = pod.containers
        own = os.readlink(f"/proc/{container.main_pid()}/ns/pid")
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                if path.read_text() == "mobula-worker\n" and os.readlink(path.parent / "ns/pid") == own:
                    found.append(int(path.parent.name))
        return found

    def wait_pods_gone(self, pods, timeout_s=120):
        wait_for(lambda: all(p.gone.is_set() for p in pods), lambda: [p.name for p in pods if not p.gone.is_set()], timeout_s)

    def assert_drained(self, pods=None):
        """Each preStop has said that nothing is left, whoever of the pods ended first."""
        self.assertEqual({c.pre_stop for p in pods or self.pods() for c in p.containers} - {None}, {0})

    def assert_nothing_lost(self, pods=None):
        trained, durable = self.trained(pods), self.durable()
        print(f"trained {trained}, durable {durable}: lost {trained - durable}", flush=True)
        self.assertGreater(trained, 0)
        self.assertEqual(durable, trained)
        self.verify()

    # ---- ends ----

    def test_a_normal_end(self):
        """SUCCEEDED with all its checkpoints, and after its time to live nothing is there any more."""
        ttl_s = 4
        self.apply(40, {"ttlSecondsAfterFinished": ttl_s, "agentDeletes": False})
        status = self.wait_state("Complete", "Failed")
        ended = time.time()
        self.assertEqual((status["jobDeploymentStatus"], status["jobStatus"]), ("Complete", "SUCCEEDED"), status)
        self.assertEqual(len(self.pods()), 2)
        self.assertEqual(self.trained(), 40)
        self.assert_nothing_lost()
        self.assertEqual(sorted(p.name for p in self.bucket.glob("iter_*")), ["iter_0000020", "iter_0000040"])
        manifest = json.loads((self.bucket / "iter_0000040/.mobula/manifest.json").read_text())
        self.assertEqual(manifest["num_nodes"], 2)
        wait_for(lambda: not self.left(), lambda: f"left: {self.left()}")
        self.assertGreaterEqual(time.time() - ended, ttl_s - 2)
        self.assert_drained()
        self.assertFalse(any(p.was_killed for p in self.pods()))

    def test_suspended_resumed_deleted(self):
        """As Kueue preempts a job, and lets it in again: the pods are told to go at once, nobody asks the job to stop."""
        self.apply(ENDLESS)
        self.wait_durable(INTERVAL)
        self.patch({"suspend": True})
        self.wait_state("Suspended")
        first = self.pods()
        self.wait_pods_gone(first)
        self.assertEqual(self.operator.stops[self.first_stop:], [])
        self.assert_nothing_lost()
        before = self.durable()
        self.patch({"suspend": False})
        self.assertEqual(self.wait_later_attempt(lambda: self.pods()[2:]), before)
        self.wait_durable(before + INTERVAL)
        self.delete()
        self.wait_pods_gone(self.pods())
        self.assertEqual(self.operator.stops[self.first_stop:], [self.operator.posts[-1]])
        self.assert_nothing_lost()
        self.assert_drained()
        self.assertFalse(any(p.was_killed for p in self.pods()))

    def test_the_active_deadline(self):
        """Of an endless job: it has ended, with all that it trained, before the operator calls it DeadlineExceeded."""
        limit_s = 50
        self.apply(ENDLESS, {"activeDeadlineSeconds": limit_s})
        status = self.wait_state("Complete", "Failed")
        self.assertEqual((status["jobDeploymentStatus"], status["jobStatus"]), ("Complete", "SUCCEEDED"), status)
        self.assertLessEqual(seconds_of(status["endTime"]), seconds_of(status["startTime"]) + limit_s)
        self.assert_nothing_lost()

    def test_a_worker_is_drained(self):
        """An eviction: preStop and SIGTERM for one pod. The gang goes on with the pod that is made in its place."""
        self.apply(ENDLESS, {"maxRestarts": 1})
        self.wait_durable(INTERVAL)
        worker, = self.pods("worker")
        self.plane.ok("DELETE", self.plane.path("Pod", NAMESPACE, worker.name))
        self.wait_pods_gone([worker])
        trained, durable = self.trained(), self.durable()
        began = self.wait_later_attempt(self.pods)
        print(f"trained {trained}, durable {durable}, went on from {began}: lost {trained - began}", flush=True)
        self.assertEqual((durable, began), (trained, trained))
        self.wait_durable(began + INTERVAL)
        self.verify()

    def lose(self, pod):
        """Its node, while it trains: (trained, saved, durable) at that moment."""
        pod.lose()
        trained, saved, durable = self.trained(), self.saved(), self.durable()
        print(f"trained {trained}, saved {saved}, durable {durable}", flush=True)
        return trained, saved, durable

    def assert_bound(self, began, trained, saved, durable):
        """Of what a lost node takes along: an interval of saves, and what was being uploaded."""
        print(f"went on from {began}: lost {trained - began}", flush=True)
        self.assertGreaterEqual(began, durable)
        self.assertLessEqual(trained - began, INTERVAL + (saved - durable))

    def test_a_worker_is_lost(self):
        self.apply(ENDLESS, {"maxRestarts": 1})
        self.wait_durable(2 * INTERVAL)
        counted = self.lose(self.pods("worker")[0])
        began = self.wait_later_attempt(self.pods)
        self.assert_bound(began, *counted)
        self.wait_durable(began + INTERVAL)
        self.verify()

    def test_the_head_is_lost(self):
        """The operator makes another, which knows nothing of the job and is given it again under its name."""
        self.apply(ENDLESS)
        self.wait_durable(2 * INTERVAL)
        counted = self.lose(self.pods("head")[0])
        lost = time.monotonic()
        began = self.wait_later_attempt(self.pods, timeout_s=300)  # a connection that stands is given up first, then the gang of before
        print(f"trains again after {time.monotonic() - lost:.0f} s", flush=True)
        self.assert_bound(began, *counted)
        self.assertEqual(self.operator.posts[-2:], 2 * [self.status()["jobId"]])
        self.wait_durable(began + INTERVAL)
        self.verify()

    def test_a_rank_fails_and_a_retry(self):
        """FAILED only when what was saved is durable; another cluster, another job id, which goes on from there."""
        self.apply(ENDLESS, {"backoffLimit": 1})
        self.wait_durable(INTERVAL)
        job_id, first = self.status()["jobId"], self.pods()
        os.kill(self.rank_pids(self.pods("worker")[0])[0], signal.SIGKILL)
        wait_for(lambda: self.status().get("jobId") not in (job_id, None), lambda: f"a retry: {self.status()}")
        trained, saved, durable = self.trained(first), self.saved(first), self.durable()
        print(f"trained {trained}, saved {saved}, durable {durable}: lost {saved - durable} of what was saved", flush=True)
        self.assertEqual(durable, saved)
        self.assertLessEqual(trained - durable, INTERVAL)
        self.assertEqual(self.wait_later_attempt(lambda: self.pods()[2:]), durable)
        self.assertEqual(self.status()["failed"], 1)
        self.wait_durable(durable + INTERVAL)
        self.verify()

    def test_a_grace_period_that_is_too_short(self):
        """The bucket takes longer for a checkpoint than the pods have: what is durable stays, and is whole."""
        self.apply(ENDLESS, {"terminationGracePeriodSeconds": 8})
        self.wait_durable(2 * INTERVAL)
        self.addCleanup(setattr, self.proxy, "rate", None)
        self.proxy.rate = 1000  # bytes a second: of a checkpoint of this model hundreds of seconds
        durable = self.durable()
        self.patch({"suspend": True})
        self.wait_pods_gone(self.pods())
        self.proxy.rate = None
        trained, saved, now = self.trained(), self.saved(), self.durable()
        print(f"trained {trained}, saved {saved}, durable {durable} before and {now}: lost {trained - now}", flush=True)
        self.assertGreaterEqual(now, durable)
        self.assertLessEqual(trained - saved, INTERVAL)
        self.verify()
        self.patch({"suspend": False})
        self.assertEqual(self.wait_later_attempt(lambda: self.pods()[2:]), now)

    def test_a_grace_shorter_than_an_upload(self):
        """Each checkpoint is half of the time between two saves on its way, and pods have less than that: what is lost was trained since
        the last save, or was that save."""
        interval, grace_s = 60, 1
        self.apply(100 * interval, {"terminationGracePeriodSeconds": grace_s}, interval=interval, batch=64)
        wait_for(lambda: self.saved() >= interval, lambda: f"a first save: {self.status()}")
        first = time.monotonic()
        wait_for(lambda: self.saved() >= 2 * interval, lambda: f"a second save: {self.status()}")
        upload_s = (time.monotonic() - first) / 2
        self.assertGreater(upload_s, grace_s + 2, "iterations are too quick here for an upload that the grace period does not cover")
        self.wait_durable(2 * interval)
        manifest = json.loads((self.bucket / f"iter_{2 * interval:07}/.mobula/manifest.json").read_text())
        self.addCleanup(setattr, self.proxy, "rate", None)
        self.proxy.rate = sum(f["size"] for f in manifest["files"]) / upload_s
        wait_for(lambda: self.saved() >= 3 * interval, lambda: f"a third save: {self.status()}")
        trained, saved, durable = self.trained(), self.saved(), self.durable()
        self.patch({"suspend": True})
        self.wait_pods_gone(self.pods())
        self.proxy.rate = None
        last, now = self.trained(), self.durable()
        print(f"an upload of {upload_s:.1f} s: trained {trained} and then {last}, saved {saved}, durable {durable} and then {now}: "
              f"lost {last - now}", flush=True)
        self.assertGreaterEqual(now, durable)
        self.assertGreater(last, now)
        self.assertLessEqual(last - now, interval + (saved - durable))
        self.verify()
        self.patch({"suspend": False})
        self.assertEqual(self.wait_later_attempt(lambda: self.pods()[2:]), now)

    # ---- who posts the job ----

    def assert_ended_well(self, iterations):
        """Complete only after the submitter, whose log is the job's; then nothing is left."""
        status = self.wait_state("Complete", "Failed", timeout_s=240)
        self.assertEqual((status["jobDeploymentStatus"], status["jobStatus"]), ("Complete", "SUCCEEDED"), status)
        self.assertEqual(self.operator.posts[self.first_post:], [])
        self.assertEqual((self.trained(), self.went_on_from(None)), (iterations, []))  # it ran once
        self.assert_nothing_lost()
        wait_for(lambda: not self.left(), lambda: f"left: {self.left()}")
        self.assert_drained()

    @unittest.skipUnless(PROGRAM, "the little control plane has no controller of Jobs; tools/test --all builds the real one")
    def test_submitted_by_a_pod(self):
        """K8sJobMode: a Job runs our CLI. Where its pod is lost another one follows the job that is there."""
        iterations = 1500
        self.apply(iterations, {"submissionMode": "K8sJobMode", "ttlSecondsAfterFinished": 4, "agentDeletes": False}, interval=iterations // 2)
        wait_for(lambda: self.trained() > 10, lambda: f"it trains: {self.status()}")
        lost, = self.submitters()
        lost.lose()
        wait_for(lambda: len(self.submitters()) == 2, lambda: f"another submitter: {self.status()}")
        self.assertLess(self.trained(), iterations)
        self.assert_ended_well(iterations)
        follower = self.submitters()[1]
        self.assertEqual([c.code for c in follower.containers], [0])
        self.assertIn(f"iteration {iterations:8}/", follower.log())

    def test_submitted_by_a_sidecar(self):
        """SidecarMode: Ray's own client in the pod of a real Ray head, both nodes are ours behind it."""
        self.apply(2 * INTERVAL, {"submissionMode": "SidecarMode", "ttlSecondsAfterFinished": 4, "agentDeletes": False},
                   head={"kind": "ray", "image": f"{RAY_IMAGE}:2.60.0"}, workers={"startParams": {"object-store-memory": "80000000"}})
        self.assert_ended_well(2 * INTERVAL)
        head, = self.pods("head")
        self.assertEqual(len(self.pods("worker")), 2)
        client = next(c for c in head.containers if c.name == "ray-job-submitter")
        self.assertEqual(client.code, 0)
        self.assertIn(f"iteration {2 * INTERVAL:8}/", client.log_path.read_text(errors="replace"))


if __name__ == "__main__":
    why = namespaces.enter()
    if why:
        print(f"skipped: {why}")
        sys.exit(77)
    unittest.main()

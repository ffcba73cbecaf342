"""The head's agent and its RayJob: deadline, owners, early notice and end, whatever the API server does."""

import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import yaml

from e2e.cluster import Cluster, wait_until
from fake_api import FakeApi, stamp

ROLE = "/apis/rbac.authorization.k8s.io/v1/namespaces/team/roles/mini"
OWNS = {"MOBULA_RAYJOB_OWNS": "configmaps/mini-files persistentvolumeclaims/mini"}
OWNER = {"metadata": {"ownerReferences": [
    {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "mini", "uid": "uid-1"}]}}


class Case(unittest.TestCase):
    def setUp(self):
        self.api = self.enterContext(FakeApi(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-kube-"))))
        self.api.rayjob()

    def cluster(self, nodes=1, **env):
        return Cluster(nodes=nodes, env=self.api.environment(**env))

    def log(self, cluster, node="node-0"):
        return (cluster.node(node)["dir"] / "agent.log").read_text(errors="replace")

    def wait_log(self, cluster, text, node="node-0"):
        wait_until(lambda: text in self.log(cluster, node), lambda: f"{text!r} in:\n{self.log(cluster, node)}", 150)

    def ends(self, cluster, change, why):
        cluster.submit(["mobula", "run", "--stop-grace", "2s", "--", "sh", "-c", "echo it runs; exec sleep 1000"],
                       submission_id="job")
        wait_until(lambda: "it runs\n" in cluster.logs("job"), "the rank", 150)
        wait_until(lambda: self.api.asked("GET"), "a first look", 150)
        change()
        job = cluster.wait_job("job", timeout_s=240)
        self.assertEqual(job["status"], "FAILED")
        self.assertIn(why, job["message"])


class Deadline(Case):
    def test_it_replaces_the_estimate_and_is_followed(self):
        """Also when somebody edits it; the gang ends for it, on the node that nobody asks."""
        self.api.rayjob(spec={"activeDeadlineSeconds": 100000})
        with self.cluster(2, MOBULA_ACTIVE_DEADLINE_SECONDS="5000") as cluster:
            for node in ("node-0", "node-1"):
                self.wait_log(cluster, "the RayJob's active deadline in_s=99", node)
            self.assertEqual(len({r.token for r in self.api.requests}), 1)
            cluster.submit(["mobula", "run", "--num-nodes", "2", "--stop-grace", "2s", "--", "sh", "-c",
                            "echo rank $RANK runs; exec sleep 1000"], submission_id="ends")
            for rank in range(2):  # equal lines of both would be shown once
                wait_until(lambda: f"rank {rank} runs" in cluster.logs("ends"), lambda: cluster.logs("ends"), 150)
            url = f"http://127.0.0.1:{cluster.node('node-1')['http_port']}/metrics"
            with urllib.request.urlopen(url, timeout=30) as reply:
                line = re.search(r'^mobula_deadline_seconds\{.*source="RayJob".*\} (\S+)$', reply.read().decode(), re.M)
            self.assertGreater(float(line[1]), 90000)
            self.api.rayjob(spec={"activeDeadlineSeconds": 20}, status={"startTime": stamp(time.time())})
            job = cluster.wait_job("ends", timeout_s=240)
            self.assertEqual(job["status"], "SUCCEEDED", cluster.logs("ends"))
            self.assertIn("ended for its deadline (RayJob)", cluster.logs("ends"))

    def test_a_margin_is_taken_off_both(self):
        """Off the estimate and off what was read, also on the node that nobody asks."""
        self.api.rayjob(spec={"activeDeadlineSeconds": 100000})
        with self.cluster(2, MOBULA_ACTIVE_DEADLINE_SECONDS="50000", MOBULA_START_ALLOWANCE_SECONDS="0",
                          MOBULA_DEADLINE_MARGIN_SECONDS="20500") as cluster:
            for node in ("node-0", "node-1"):
                self.wait_log(cluster, "as far as this node can know, in_s=29", node)
                self.wait_log(cluster, "the RayJob's active deadline in_s=79", node)


class Estimate(Case):
    def test_none_is_an_answer_too(self):
        with self.cluster(MOBULA_ACTIVE_DEADLINE_SECONDS="1000") as cluster:
            self.wait_log(cluster, "the RayJob has no active deadline")
            cluster.submit("mobula run -- sh -c 'echo it runs; exec sleep 1000'", submission_id="endless")
            wait_until(lambda: "it runs\n" in cluster.logs("endless"), "the rank", 150)
            url = f"http://127.0.0.1:{cluster.node('node-0')['http_port']}/metrics"
            with urllib.request.urlopen(url, timeout=30) as reply:
                self.assertNotRegex(reply.read().decode(), r"(?m)^mobula_deadline_seconds\{")
            self.assertEqual(cluster.call("POST", "/api/jobs/endless/stop")[0], 200)
            cluster.wait_job("endless")

    def test_the_estimate_counts_while_nobody_answers(self):
        self.api.faults = [500] * 1000
        with self.cluster(MOBULA_ACTIVE_DEADLINE_SECONDS="40", MOBULA_START_ALLOWANCE_SECONDS="20") as cluster:
            done = cluster.mobula("run", "--stop-grace", "2s", "--", "sh", "-c", "exec sleep 1000", timeout=200)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("ended for its deadline (estimated)", done.stdout)
            self.assertEqual(self.log(cluster).count("made to fail with 500"), 1)  # said once


class Faults(Case):
    def test_tokens_are_read_anew(self):
        with self.cluster() as cluster:
            wait_until(lambda: self.api.asked("GET"), "a first look", 150)
            self.api.tokens = {"second"}
            self.wait_log(cluster, "made to fail with 401")
            self.api.new_token("second")
            self.wait_log(cluster, "the API server answers again")
            self.assertEqual(self.api.asked("GET")[-1].token, "second")

    def test_a_slow_server_holds_nothing_up(self):
        """Nobody waits for what takes it 9 s each; a busy machine may well take one of them itself."""
        self.api.faults = [9.0, 9.0]
        with self.cluster() as cluster:
            end = time.monotonic() + 12
            slowest = 0.0
            while time.monotonic() < end:
                began = time.monotonic()
                cluster.get("/api/version")
                slowest = max(slowest, time.monotonic() - began)
            self.assertLess(slowest, 5.0)

    def test_a_server_that_is_another(self):
        (self.api.account / "ca.crt").write_bytes((self.api.dir / "certs/other-ca.pem").read_bytes())
        with self.cluster(**OWNS) as cluster:
            self.wait_log(cluster, "cannot be read")
            self.assertEqual(self.api.requests, [])

    def test_a_pod_without_an_account(self):
        (self.api.account / "namespace").unlink()
        with self.cluster() as cluster:
            self.assertIn("the RayJob cannot be asked for its deadline", self.log(cluster))
            self.assertEqual(self.api.requests, [])

    def test_not_a_rayjob(self):
        self.api.rayjob(status={"startTime": "soon"})
        with self.cluster() as cluster:
            self.wait_log(cluster, "startTime")


class Owners(Case):
    def settled(self):
        return {r.path.split("/", 5)[5] for r in self.api.asked("PATCH")}

    def test_once_each_through_faults(self):
        self.api.own("configmaps", "mini-files")
        self.api.own("persistentvolumeclaims", "mini")
        self.api.faults = [500, 429, None, 409, 503, None, 500]
        with self.cluster(**OWNS) as cluster:
            self.wait_log(cluster, "owns persistentvolumeclaims/mini")
            looks = len(self.api.asked("GET"))
            wait_until(lambda: len(self.api.asked("GET")) > looks + 2, "more looks", 150)
        patches = self.api.asked("PATCH")
        self.assertEqual([r.path for r in patches], ["/api/v1/namespaces/team/configmaps/mini-files",
                                                     "/api/v1/namespaces/team/persistentvolumeclaims/mini"])
        for r in patches:
            self.assertEqual((r.type, r.body), ("application/strategic-merge-patch+json", OWNER))

    def test_of_another_group(self):
        self.api.objects[ROLE] = {}
        with self.cluster(MOBULA_RAYJOB_OWNS="rbac.authorization.k8s.io/v1/roles/mini") as cluster:
            self.wait_log(cluster, "owns rbac.authorization.k8s.io/v1/roles/mini")
        self.assertEqual([r.path for r in self.api.asked("PATCH")], [ROLE])

    def test_custom_resources(self):
        """Of them the server takes no strategic merge patch: it answers it with 415, as the real one does."""
        name = "monitoring.coreos.com/v1/podmonitors/mini"
        path = "/apis/monitoring.coreos.com/v1/namespaces/team/podmonitors/mini"
        self.api.objects[path] = self.api.objects[ROLE] = {}
        with self.cluster(MOBULA_RAYJOB_OWNS=f"{name} rbac.authorization.k8s.io/v1/roles/mini") as cluster:
            self.wait_log(cluster, f"owns {name}")
            self.wait_log(cluster, "owns rbac.authorization.k8s.io/v1/roles/mini")
        self.assertEqual([(r.path, r.type, r.body) for r in self.api.asked("PATCH")],
                         [(path, "application/merge-patch+json", OWNER),
                          (ROLE, "application/strategic-merge-patch+json", OWNER)])

    def test_what_is_not_there(self):
        self.api.own("persistentvolumeclaims", "mini")
        with self.cluster(**OWNS) as cluster:
            self.wait_log(cluster, "owns persistentvolumeclaims/mini")
            looks = len(self.api.asked("GET"))
            wait_until(lambda: len(self.api.asked("GET")) > looks + 2, "more looks", 150)
            self.assertIn("configmaps/mini-files: 404", self.log(cluster))
        self.assertEqual(len(self.api.asked("PATCH", 404)), 1)

    def test_a_start_that_fails(self):
        """What the chart made is cleaned up also then."""
        self.api.own("configmaps", "mini-files")
        self.api.own("persistentvolumeclaims", "mini")
        with socket.socket() as taken, self.cluster(0, **OWNS) as cluster:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            done = cluster.mobula("start", "--head", "--temp-dir", cluster.temp, "--port", str(taken.getsockname()[1]),
                                  "--node-ip-address", "127.0.0.1", "--dashboard-port", "0",
                                  "--dashboard-agent-listen-port", "0", timeout=120)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            wait_until(lambda: len(self.api.asked("PATCH")) >= 2, lambda: f"owners: {self.api.requests}\n{done.stdout}", 150)
        self.assertEqual(self.settled(), {"configmaps/mini-files", "persistentvolumeclaims/mini"})


class End(Case):
    def test_suspended(self):
        with self.cluster() as cluster:
            self.ends(cluster, lambda: self.api.rayjob(spec={"suspend": True}), "the RayJob is suspended")

    def test_the_charts_pre_stop(self):
        """Its command as the golden manifest has it, on a node where ranks run and on one where none do."""
        golden = pathlib.Path(__file__).parents[1] / "charts/golden/values-cpu-smoke.yaml"
        job, = (d for d in yaml.safe_load_all(golden.read_text()) if d["kind"] == "RayJob")
        head, = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        program, *words = head["lifecycle"]["preStop"]["exec"]["command"]
        self.assertEqual(program, "mobula")
        with self.cluster() as cluster:
            def pre_stop():
                done = cluster.mobula(*words, env={"MOBULA_TEMP_DIR": cluster.temp}, timeout=120)
                self.assertEqual(done.returncode, 0, done.stdout)

            self.ends(cluster, pre_stop, "the node is drained")
            pre_stop()

    def test_deleted(self):
        with self.cluster() as cluster:
            self.ends(cluster, lambda: self.api.rayjob(metadata={"deletionTimestamp": stamp(time.time())}),
                      "the RayJob is deleted")

    def test_gone(self):
        with self.cluster() as cluster:
            self.ends(cluster, self.api.objects.clear, "the RayJob was deleted")

    def test_tried_again(self):
        """On another cluster: nothing of the RayJob is this one's to end."""
        with self.cluster(MOBULA_RAYJOB_DELETE_AFTER_SECONDS="0") as cluster:
            self.ends(cluster, lambda: self.api.rayjob(status={"rayClusterName": "mini-other"}),
                      "the RayJob runs on another RayCluster")
            self.api.rayjob(status={"jobDeploymentStatus": "Complete", "endTime": stamp(time.time())})
            looks = len(self.api.asked("GET"))
            wait_until(lambda: len(self.api.asked("GET")) > looks + 2, "more looks", 150)
            self.assertEqual([r for r in self.api.requests if r.method == "DELETE"], [])


class Deletion(Case):
    def test_its_time_is_over(self):
        with self.cluster(MOBULA_RAYJOB_DELETE_AFTER_SECONDS="4") as cluster:
            wait_until(lambda: self.api.asked("GET"), "a first look", 150)
            ended = int(time.time())
            self.api.rayjob(status={"jobDeploymentStatus": "Complete", "endTime": stamp(ended)})
            done, = wait_until(lambda: self.api.asked("DELETE"), "the end", 150)
            self.assertGreaterEqual(done.time, ended + 4)
            self.assertEqual(done.path, "/apis/ray.io/v1/namespaces/team/rayjobs/mini")
            self.assertEqual(done.body["preconditions"], {"uid": "uid-1"})
            self.wait_log(cluster, "the RayJob was deleted")

    def test_a_delete_that_is_refused(self):
        """500: again. 409: another one has its name."""
        with self.cluster(MOBULA_RAYJOB_DELETE_AFTER_SECONDS="0") as cluster:
            wait_until(lambda: self.api.asked("GET"), "a first look", 150)
            serve, answers = self.api.serve, [500, 403, 409]
            self.api.serve = lambda method, *a: (answers.pop(0), {}) if method == "DELETE" else serve(method, *a)
            self.api.rayjob(status={"jobDeploymentStatus": "Failed", "endTime": stamp(time.time())})
            wait_until(lambda: self.api.asked("DELETE", 409), "the last answer", 150)
            self.assertEqual([r.status for r in self.api.requests if r.method == "DELETE"], [500, 403, 409])
            looks = len(self.api.asked("GET"))
            wait_until(lambda: len(self.api.asked("GET")) > looks + 2, "more looks", 150)
            self.assertEqual(len([r for r in self.api.requests if r.method == "DELETE"]), 3)
            self.assertIn("made to fail with 403", self.log(cluster))


def side_by_side():
    """Each class in a process of its own, since they wait most of the time: 1 if one failed."""
    classes = [name for name, c in globals().items() if isinstance(c, type) and issubclass(c, Case) and c is not Case]
    runs = []
    for name in classes:
        out = tempfile.TemporaryFile("w+")
        runs.append((subprocess.Popen(["setpriv", "--pdeathsig", "KILL", sys.executable, __file__, *sys.argv[1:], name],
                                      stdout=out, stderr=subprocess.STDOUT), out))
    failed = 0
    for process, out in runs:
        failed |= process.wait() != 0
        out.seek(0)
        print(out.read(), flush=True)
    return failed


if __name__ == "__main__":
    if any(not word.startswith("-") for word in sys.argv[1:]):
        unittest.main()
    else:
        sys.exit(side_by_side())

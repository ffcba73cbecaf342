"""What the chart renders, by a real helm, checked against KubeRay's own definitions by kubeconform.

The definitions are looked for in $KUBERAY_CRDS and in shared/data/kuberay-crds beside the checkout;
without them the one test that needs them is skipped, with a line that says how to get them.
"""

import json
import os
import pathlib
import shlex
import subprocess
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(__file__).parents[3]
CHART = ROOT / "charts/mobula"
CRDS = [pathlib.Path(p) for p in (os.environ.get("KUBERAY_CRDS"), ROOT / "../shared/data/kuberay-crds") if p]
CACHE = pathlib.Path(os.environ.get("MOBULA_CACHE", pathlib.Path.home() / ".cache/mobula"))
HELM = os.environ.get("MOBULA_HELM", CACHE / "bin/helm")
KUBECONFORM = os.environ.get("MOBULA_KUBECONFORM", CACHE / "bin/kubeconform")
SMALL = {"entrypoint": ["python", "train.py", "it's", "a b"], "workers": {"replicas": 3}}


def helm(values, *more, name="mini"):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        yaml.safe_dump(values, f)
        f.flush()
        return subprocess.run([HELM, "template", name, CHART, "--kube-version", "1.36.0",
                               "--values", f.name, *more], capture_output=True, text=True, timeout=60)


def merged(*parts):
    out = {}
    for part in parts:
        for key, value in part.items():
            out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def render(*parts, name="mini"):
    done = helm(merged(*parts), name=name)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return [doc for doc in yaml.safe_load_all(done.stdout) if doc]


def strict(schema):
    """A CRD's schema with unknown fields refused, as the API server does."""
    if isinstance(schema, list):
        return [strict(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: strict(v) for k, v in schema.items()}
    if isinstance(out.get("properties"), dict) and not out.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    if out.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return out


class Render(unittest.TestCase):
    def job(self, *parts):
        docs = [d for d in render(SMALL, *parts) if d["kind"] == "RayJob"]
        self.assertEqual(len(docs), 1)
        return docs[0]

    def pods(self, job):
        cluster = job["spec"]["rayClusterSpec"]
        return [cluster["headGroupSpec"]["template"]] + [g["template"] for g in cluster.get("workerGroupSpecs", [])]

    def test_no_pod_but_the_gang(self):
        job = self.job()
        self.assertEqual(job["spec"]["submissionMode"], "HTTPMode")
        self.assertNotIn("submitterPodTemplate", job["spec"])
        group, = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        self.assertEqual({group[k] for k in ("replicas", "minReplicas", "maxReplicas")}, {2})
        self.assertEqual([d["kind"] for d in render(SMALL)], ["RayJob"])

    def test_kueue(self):
        job = self.job({"queue": {"scheduler": "kueue", "name": "team-a", "priorityClass": "high",
                                  "topology": {"required": "cloud.google.com/gce-topology-block"}}})
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "team-a")
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"], "high")
        self.assertTrue(job["spec"]["suspend"])
        self.assertTrue(job["spec"]["shutdownAfterJobFinishes"])
        self.assertNotIn("deletionStrategy", job["spec"])
        for pod in self.pods(job):
            self.assertEqual(pod["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"],
                             "cloud.google.com/gce-topology-block")

    def test_volcano(self):
        labels = self.job({"queue": {"scheduler": "volcano", "name": "q", "priorityClass": "p"}})["metadata"]["labels"]
        self.assertEqual(labels["volcano.sh/queue-name"], "q")
        self.assertEqual(labels["ray.io/scheduler-name"], "volcano")
        self.assertEqual(labels["ray.io/priority-class-name"], "p")

    def test_everything_is_deleted_after_the_end(self):
        rules = self.job()["spec"]["deletionStrategy"]["deletionRules"]
        self.assertEqual({r["policy"] for r in rules}, {"DeleteSelf"})
        self.assertEqual([r["condition"] for r in rules],
                         [{"jobStatus": "SUCCEEDED", "ttlSeconds": 3600}, {"jobStatus": "FAILED", "ttlSeconds": 3600},
                          {"jobDeploymentStatus": "Failed", "ttlSeconds": 3600}])

    def test_entrypoint_is_quoted_for_the_shell(self):
        line = self.job({"checkpoint": {"url": "s3://b/p"}, "job": {"maxRestarts": 2}})["spec"]["entrypoint"]
        self.assertEqual(shlex.split(line), [
            "exec", "mobula", "run", "--num-nodes", "3", "--ranks-per-node", "1", "--max-restarts", "2",
            "--checkpoint-url", "s3://b/p", "--save", "/tmp/checkpoints",
            "--", "python", "train.py", "it's", "a b"])
        line = self.job({"verb": "train", "entrypoint": ["--mock-data"]})["spec"]["entrypoint"]
        self.assertEqual(shlex.split(line), ["exec", "mobula", "train", "--num-nodes", "3", "--gpus-per-node", "1", "--mock-data"])

    def test_the_command_line_is_one_that_mobula_takes(self):
        """It reads flags from left to right: one that does not exist, put last, is the one it names."""
        line = self.job({"checkpoint": {"url": "s3://b/p"}, "job": {"maxRestarts": 2}})["spec"]["entrypoint"]
        args = shlex.split(line)[2:]
        args.insert(args.index("--"), "--no-such-flag")
        done = subprocess.run([os.environ["MOBULA_BIN"], *args], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 64)
        self.assertIn("--no-such-flag", done.stderr)

    def test_ports_probes_and_secrets(self):
        job = self.job({"workers": {"env": {"TOKEN": {"name": "s", "key": "k"}, "COUNT": "1"}, "resources": {
            "gpu": 8, "extra": {"vpc.amazonaws.com/efa": 32}}}})
        head, worker = (p["spec"] for p in self.pods(job))
        self.assertEqual({p["name"] for p in head["containers"][0]["ports"]}, {"gcs-server", "dashboard", "agent", "metrics"})
        for pod in (head, worker):
            c, = pod["containers"]
            self.assertEqual(c["resources"]["requests"], c["resources"]["limits"])
            self.assertEqual(c["resources"]["limits"]["nvidia.com/gpu"], "8")
            self.assertEqual(c["resources"]["limits"]["vpc.amazonaws.com/efa"], "32")
            env = {e["name"]: e for e in c["env"]}
            self.assertEqual(env["BUCKET_STORAGE_SECRET_KEY"]["valueFrom"]["secretKeyRef"],
                             {"name": "minio-credentials", "key": "minio-secret-key"})
            self.assertEqual(env["TOKEN"]["valueFrom"]["secretKeyRef"], {"name": "s", "key": "k"})
            self.assertEqual(env["COUNT"]["value"], "1")
            self.assertEqual(pod["terminationGracePeriodSeconds"], 900)
            self.assertIn("httpGet", c["readinessProbe"])
        self.assertEqual(job["spec"]["rayClusterSpec"]["authOptions"], {"mode": "token"})

    def test_without_a_token_every_pod_says_so(self):
        for mode, want in [("token", []), ("disabled", ["disabled"])]:
            job = self.job({"auth": {"mode": mode}})
            self.assertEqual(job["spec"]["rayClusterSpec"]["authOptions"], {"mode": mode})
            for pod in self.pods(job):
                env = pod["spec"]["containers"][0]["env"]
                self.assertEqual([e["value"] for e in env if e["name"] == "RAY_AUTH_MODE"], want)

    def test_one_node(self):
        job = self.job({"workers": {"replicas": 1, "resources": {"gpu": 0}}})
        self.assertNotIn("workerGroupSpecs", job["spec"]["rayClusterSpec"])
        self.assertNotIn("nvidia.com/gpu", self.pods(job)[0]["spec"]["containers"][0]["resources"]["limits"])

    def test_refusals(self):
        for values, name, text in [
            ({"entrypoint": []}, "mini", "entrypoint is empty"),
            ({}, "a" * 48, "has 48 characters"),
            ({}, "9lives", "a letter in front"),
            ({"queue": {"name": "q"}}, "mini", "queue.scheduler is not"),
            ({"queue": {"scheduler": "kueue"}}, "mini", "queue.name is empty"),
            ({"verb": "train", "entrypoint": "echo"}, "mini", "Megatron arguments as a list"),
            ({"workers": {"replicas": 0}}, "mini", "replicas"),
            ({"workers": {"replica": 2}}, "mini", "replica"),
            ({"checkpoint": {"url": "gs://b"}}, "mini", "url"),
            ({"workers": {"resources": {"gpuResourceName": "intel.com/gpu"}}}, "mini", "gpuResourceName"),
        ]:
            with self.subTest(values=values, name=name):
                done = helm(merged(SMALL, values), name=name)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(text, done.stderr)

    def test_lint(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
            yaml.safe_dump(SMALL, f)
            f.flush()
            done = subprocess.run([HELM, "lint", "--strict", CHART, "--values", f.name],
                                  capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Conform(unittest.TestCase):
    CASES = [{}, {"queue": {"scheduler": "kueue", "name": "q", "topology": {"preferred": "x/y"}}},
             {"queue": {"scheduler": "volcano", "name": "q"}}, {"workers": {"replicas": 1}},
             {"entrypoint": "echo 'a: b' # c", "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
              "job": {"activeDeadlineSeconds": 100, "preRunningDeadlineSeconds": 50, "backoffLimit": 1},
              "workers": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}, "priorityClassName": "p",
                          "podLabels": {"k": "v"}, "podAnnotations": {"k": "v"}},
              "image": {"pullSecrets": ["s"]}, "auth": {"mode": "token", "secretName": "s"}}, {"auth": {"mode": "disabled"}}]

    @classmethod
    def setUpClass(cls):
        found = [p for p in CRDS if (p / "ray.io_rayjobs.yaml").exists()]
        if not found:
            raise unittest.SkipTest("KubeRay's definitions are not here: set KUBERAY_CRDS to the folder crd/bases of a KubeRay release")
        crd = yaml.safe_load((found[0] / "ray.io_rayjobs.yaml").read_text())
        version, = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
        cls.schemas = tempfile.TemporaryDirectory(prefix="mb-crd-")
        cls.addClassCleanup(cls.schemas.cleanup)
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        pathlib.Path(cls.schemas.name, "rayjob_v1.json").write_text(json.dumps(schema))

    def conform(self, text):
        return subprocess.run([KUBECONFORM, "-summary", "-strict", "-schema-location",
                               f"{self.schemas.name}/{{{{.ResourceKind}}}}_{{{{.ResourceAPIVersion}}}}.json", "-"],
                              input=text, capture_output=True, text=True, timeout=60)

    def test_rayjobs_conform(self):
        for case in self.CASES:
            with self.subTest(case=case):
                done = self.conform(yaml.safe_dump_all(render(SMALL, case)))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("Valid: 1", done.stdout)

    def test_a_wrong_field_is_seen(self):
        job, = render(SMALL)
        job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containerz"] = []
        self.assertNotEqual(self.conform(yaml.safe_dump(job)).returncode, 0)


if __name__ == "__main__":
    unittest.main()

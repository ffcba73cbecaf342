"""The pods that KubeRay makes of the chart's RayJobs. kuberay_pods.py makes them here; what it adds is compared with the pods
that KubeRay 1.7 has made ($KUBERAY_PODS, or shared/data/kuberay-pods beside the checkout; without them that is skipped)."""

import copy
import json
import os
import pathlib
import shlex
import subprocess
import tempfile
import unittest

import yaml

import kuberay_pods
import test_chart as chart
import test_clouds as clouds

RECORDED = next((p for p in (os.environ.get("KUBERAY_PODS"), chart.ROOT / "../shared/data/kuberay-pods")
                 if p and pathlib.Path(p, "pods-all.yaml").exists()), None)
RAY = {"head": {"kind": "ray", "image": "ray:1"}}
ADDED = {e["name"] for is_head in (False, True) for e in kuberay_pods.ray_env("", is_head, "c", "n")}


def rendered():
    """(what, RayJob) of every override and of what clouds add."""
    nemo = yaml.safe_load(clouds.NEMO)
    for f in chart.OVERRIDES:
        yield f.name, chart.job_in(chart.documents(f))
    for values in [*(chart.merged(chart.SMALL, case) for case in chart.Conform.CASES), nemo,
                   chart.merged(nemo, {"volumes": {"nfsMountPath": "/nfs"}, "workload": {"embeddedTensorboardTarget": "/nfs/x"}}),
                   chart.merged(chart.SMALL, clouds.TensorBoard.STORE),
                   chart.merged(chart.SMALL, clouds.TensorBoard.STORE, RAY),
                   *(chart.merged(chart.SMALL, RAY, {"job": {"submissionMode": mode}}) for mode in ("K8sJobMode", "SidecarMode")),
                   *({**chart.SMALL, "network": {"preset": preset}, "workers": {"resources": {"extra": {"vpc.amazonaws.com/efa": 4}}}}
                     for preset in ("rdma", "efa", "tcpx"))]:
        yield values, chart.job_in(chart.render(values))


def without_api_server(pod):
    """What the API server has filled in."""
    spec = pod["spec"]
    for c in [*spec["containers"], *spec.get("initContainers", [])]:
        c["volumeMounts"] = [m for m in c.get("volumeMounts", []) if not m["name"].startswith("kube-api-access")]
        for e in c.get("env", []):
            e.get("valueFrom", {}).get("fieldRef", {}).pop("apiVersion", None)
        for p in c.get("ports", []):
            p.pop("protocol", None)
    spec["volumes"] = [v for v in spec["volumes"] if not v["name"].startswith("kube-api-access")]
    return pod


def group_of(pod):
    """The group whose template this pod was made of: what kuberay_pods.py adds is taken away again."""
    pod = copy.deepcopy(pod)
    spec, c = pod["spec"], pod["spec"]["containers"][0]
    del c["command"], c["args"]
    c["env"] = [e for e in c["env"] if e["name"] not in ADDED]
    c["ports"] = [p for p in c["ports"] if p["name"] != "metrics"]
    spec["initContainers"] = [i for i in spec.get("initContainers", []) if i["name"] != "wait-gcs-ready"]
    for i in spec["initContainers"]:
        i["env"] = [e for e in i["env"] if e["name"] not in ADDED]
    spec.pop("restartPolicy")
    return {"groupName": pod["metadata"]["labels"]["ray.io/group"], "template": {"spec": spec}}


@unittest.skipUnless(RECORDED, "no recorded pods of KubeRay: set KUBERAY_PODS to a folder with pods-all.yaml")
class Recorded(unittest.TestCase):
    def test_the_same_is_added(self):
        pods = [without_api_server(p) for p in chart.load(pathlib.Path(RECORDED, "pods-all.yaml").read_text())["items"]]
        self.assertEqual(len(pods), 8)
        for pod in pods:
            labels = pod["metadata"]["labels"]
            is_head, group = labels["ray.io/node-type"] == "head", group_of(pod)
            made = kuberay_pods.pod({"headGroupSpec": group if is_head else {}}, group, labels["ray.io/cluster"])
            with self.subTest(pod=pod["metadata"]["name"]):
                labels.pop("ray.io/worker-group-replica-index", None)
                self.assertEqual(made["metadata"]["labels"], labels)
                self.assertEqual(made["metadata"]["generateName"], pod["metadata"]["generateName"])
                self.assertEqual(made["spec"]["restartPolicy"], pod["spec"]["restartPolicy"])
                c, want = made["spec"]["containers"][0], pod["spec"]["containers"][0]
                self.assertEqual((c["command"], c["args"], c["env"]), (want["command"], want["args"], want["env"]))
                self.assertEqual(sorted(p["name"] for p in c["ports"]), sorted(p["name"] for p in want["ports"]))
                self.assertEqual(c["volumeMounts"], want["volumeMounts"])
                inits, wanted = made["spec"].get("initContainers", []), pod["spec"].get("initContainers", [])
                self.assertEqual([i["name"] for i in inits], [i["name"] for i in wanted])
                for i, want in zip(inits, wanted):
                    self.assertEqual((i["env"], i["command"], i["volumeMounts"]), (want["env"], want["command"], want["volumeMounts"]))
                    if i["name"] == "wait-gcs-ready":
                        ask, = (line for line in want["args"][0].splitlines() if "if ray health-check" in line and "dev/null" not in line)
                        self.assertIn(ask.split("if ")[1].split(";")[0].strip(), i["args"][0])

    def test_the_service(self):
        services = chart.load(pathlib.Path(RECORDED, "svc-all.yaml").read_text())["items"]
        pods = chart.load(pathlib.Path(RECORDED, "pods-all.yaml").read_text())["items"]
        tried = 0
        for s in services:
            selector = s["spec"].get("selector") or {}
            for pod in pods:
                labels = pod["metadata"]["labels"]
                if not selector or not selector.items() <= labels.items():
                    continue
                cluster = labels["ray.io/cluster"]
                want = kuberay_pods.labels(cluster, "headgroup", True)
                self.assertLessEqual(selector.items(), want.items())
                head = copy.deepcopy(pod["spec"])
                head["containers"][0]["ports"] = group_of(pod)["template"]["spec"]["containers"][0]["ports"]
                self.assertEqual({p["name"]: p["port"] for p in s["spec"]["ports"]}, kuberay_pods.service_ports(head))
                tried += 1
        self.assertGreaterEqual(tried, 4)


class Chart(unittest.TestCase):
    def test_the_operator_reaches_the_head(self):
        """Its Service finds the head's pod and no other, and has the ports by name."""
        for what, job in rendered():
            if job["kind"] != "RayJob":
                continue
            with self.subTest(what=what):
                head, *workers = kuberay_pods.pods(job, "mini-abcde")
                want = {k: v for k, v in kuberay_pods.labels("mini-abcde", "headgroup", True).items() if k.startswith(("app.", "ray.io/cluster", "ray.io/node-type"))}
                self.assertLessEqual(want.items(), head["metadata"]["labels"].items())
                for pod in workers:
                    self.assertFalse(want.items() <= pod["metadata"]["labels"].items())
                ports = kuberay_pods.service_ports(head["spec"])
                self.assertEqual({k: ports[k] for k in ("dashboard", "gcs-server", "metrics")},
                                 {"dashboard": 8265, "gcs-server": 6379, "metrics": 8080})

    def test_nothing_is_there_twice(self):
        """Names of containers, volumes and variables, mount paths, and what the operator adds."""
        for what, job in rendered():
            for pod in kuberay_pods.pods(job, "mini-abcde"):
                spec = pod["spec"]
                containers = [*spec["containers"], *spec.get("initContainers", [])]
                for things in ([c["name"] for c in containers], [v["name"] for v in spec["volumes"]],
                               *([e["name"] for e in c.get("env", [])] for c in containers),
                               *([m["mountPath"].rstrip("/") for m in c.get("volumeMounts", [])] for c in containers)):
                    with self.subTest(what=what, pod=pod["metadata"]["generateName"]):
                        self.assertEqual(sorted(things), sorted(set(things)))

    def test_numbers_of_the_command_line(self):
        """As KubeRay counts limits: our `ray start` is told bytes, and GPUs of either maker."""
        for values, want in [({}, ["--memory=107374182400", "--num-cpus=8", "--num-gpus=1"]),
                             (chart.merged(chart.NVIDIA, {"workers": {"resources": {"gpu": 8, "cpu": "1500m", "memory": "1.5Gi"}}}),
                              ["--memory=1610612736", "--num-cpus=2", "--num-gpus=8"])]:
            for pod in kuberay_pods.pods(chart.job_in(chart.render(chart.SMALL, values)), "mini-abcde"):
                line, = pod["spec"]["containers"][0]["args"]
                self.assertEqual([w for w in line.split() if w.startswith(("--mem", "--num"))], want)
                self.assertIn("--block", line.split())

    def test_rays_own_submitter(self):
        """Bash reads its line, which has the entrypoint as it is: what Ray's client gets behind `--` are the job's words, whatever is in them."""
        words = ["python", "train.py", "it's", "a b", "$(date) `date` $HOME", 'say "x"; exit 3 # no', "a\\b"]
        for mode in ("K8sJobMode", "SidecarMode"):
            job = chart.job_in(chart.render(chart.SMALL, RAY, {"entrypoint": words, "job": {
                "submissionMode": mode, "runtimeEnv": {"env_vars": {"A": "it's \"x\" \\n"}}}}))
            c = kuberay_pods.submitter_container(job, "mini-abcde", "mini-fghij", "head:8265")
            with self.subTest(mode=mode), tempfile.TemporaryDirectory(prefix="mb-submit-") as d:
                for name, body in (("python", "exit 0"), ("ray", f'[ "$2" != status ] || exit 1; printf "%s\\0" "$@" >{d}/$2')):
                    path = pathlib.Path(d, name)
                    path.write_text(f"#!/bin/sh\n{body}\n")
                    path.chmod(0o755)
                done = subprocess.run([*c["command"], *c["args"]], env={"PATH": f"{d}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stderr)
                submitted = pathlib.Path(d, "submit").read_text().split("\0")[:-1]
                at = submitted.index("--")
                self.assertEqual(submitted[at + 1:], shlex.split(job["spec"]["entrypoint"]))
                self.assertEqual(submitted[at + 1:][-len(words):], words)
                options = submitted[:at]
                self.assertEqual(options[options.index("--submission-id") + 1], "mini-fghij")
                self.assertEqual(json.loads(options[options.index("--runtime-env-json") + 1])["env_vars"], {"A": "it's \"x\" \\n"})
                self.assertEqual(pathlib.Path(d, "logs").exists(), mode == "K8sJobMode")  # which follows what a former one has posted

    def test_our_submitter(self):
        """Of the chart's own the operator keeps the command, and tells it where and under which name."""
        job = chart.job_in(chart.render(chart.SMALL, {"job": {"submissionMode": "K8sJobMode"}}))
        made = kuberay_pods.submitter_job(job, "mini-abcde", "mini-fghij", "head:8265")
        c, = made["spec"]["template"]["spec"]["containers"]
        self.assertEqual(c["command"][:6], ["mobula", "job", "submit", "--address", "http://$(RAY_DASHBOARD_ADDRESS)", "--submission-id"])
        self.assertEqual([e["name"] for e in c["env"]], ["PYTHONUNBUFFERED", "RAY_DASHBOARD_ADDRESS", "RAY_JOB_SUBMISSION_ID", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"])
        self.assertNotIn(c["name"], [x["name"] for pod in kuberay_pods.pods(job, "mini-abcde") for x in pod["spec"]["containers"]])


if __name__ == "__main__":
    unittest.main()

"""What the chart renders, by a real helm, checked against KubeRay's own definitions by kubeconform.

The definitions are looked for in $KUBERAY_CRDS and in shared/data/kuberay-crds beside the checkout;
without them the tests that need them are skipped, with a line that says how to get them.
"""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import tempfile
import unittest

import yaml

import podmonitor

ROOT = pathlib.Path(__file__).parents[3]
CHART = ROOT / "charts/mobula"
CRDS = [pathlib.Path(p) for p in (os.environ.get("KUBERAY_CRDS"), ROOT / "../shared/data/kuberay-crds") if p]
CACHE = pathlib.Path(os.environ.get("MOBULA_CACHE", pathlib.Path.home() / ".cache/mobula"))
HELM = os.environ.get("MOBULA_HELM", CACHE / "bin/helm")
KUBECONFORM = os.environ.get("MOBULA_KUBECONFORM", CACHE / "bin/kubeconform")
OVERRIDES = sorted((CHART / "overrides").glob("*.yaml"))
KAIWO = sorted(p for name in ("kaiwo", "metadata") for p in (CHART / "overrides" / name).glob("*.yaml"))
PREPARE = sorted((CHART / "overrides/prepare").glob("*.yaml"))
# What users have today: never copied, so a checkout alone has none.
EXISTING = ROOT / "../shared/data/chart-overrides"
NVIDIA = {"workers": {"gpuResourceName": "nvidia.com/gpu"}}
MEGATRON = {"entrypoint": [], "workers": {"replicas": 2, "resources": {"gpu": 4}}}
SMALL = {"entrypoint": ["python", "train.py", "it's", "a b"], "workers": {"replicas": 3}}


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


def load(text):
    return yaml.load(text, Loader=LOADER)


def load_all(text):
    return [doc for doc in yaml.load_all(text, Loader=LOADER) if doc]


def template(name, *words):
    return subprocess.run([HELM, "template", name, CHART, "--kube-version", "1.36.0", *words], capture_output=True, text=True, timeout=60)


@functools.cache
def template_once(name, *words):
    return template(name, *words)


@functools.cache
def helm_once(name, text, *more):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write(text)
        f.flush()
        return template(name, "--values", f.name, *more)


def helm(values, *more, name="mini"):
    text = yaml.safe_dump(values)
    if name == "release-name":  # which makes a name of its own each time
        return helm_once.__wrapped__(name, text, *more)
    return helm_once(name, text, *more)


def render_files(*files, name="mini", sets=()):
    return job_in(documents(*files, name=name, sets=sets))


def documents(*files, name="mini", sets=()):
    values = [word for f in files for word in ("--values", f)] + [word for s in sets for word in ("--set", s)]
    done = template_once(name, *map(str, values))
    if done.returncode != 0:
        raise AssertionError(f"{files}: {done.stderr}")
    return load_all(done.stdout)


def job_in(docs):
    job, = (d for d in docs if d["kind"] in ("RayJob", "KaiwoJob"))
    return job


def rayjob_of(doc):
    return doc if doc["kind"] == "RayJob" else {"apiVersion": "ray.io/v1", "kind": "RayJob", **doc["spec"]["rayJob"]}


def pods_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"]] + [g["template"] for g in cluster.get("workerGroupSpecs", [])]


def arguments_of(job):
    """Of the driver: the words behind `exec mobula`, and of them those behind `--`."""
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["exec", "mobula"], words
    return words[2:], words[words.index("--") + 1:] if "--" in words else []


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
    return load_all(done.stdout)


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

    def test_no_pod_but_the_gang(self):
        job = self.job()
        self.assertEqual(job["spec"]["submissionMode"], "HTTPMode")
        self.assertNotIn("submitterPodTemplate", job["spec"])
        group, = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        self.assertEqual({group[k] for k in ("replicas", "minReplicas", "maxReplicas")}, {2})
        self.assertEqual({d["kind"] for d in render(SMALL)}, {"RayJob", "ServiceAccount", "Role", "RoleBinding"})

    def test_kueue(self):
        job = self.job({"queue": {"scheduler": "kueue", "name": "team-a", "priorityClass": "high",
                                  "topology": {"required": "cloud.google.com/gce-topology-block"}}})
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "team-a")
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"], "high")
        self.assertTrue(job["spec"]["suspend"])
        self.assertTrue(job["spec"]["shutdownAfterJobFinishes"])
        self.assertNotIn("deletionStrategy", job["spec"])
        for pod in pods_of(job):
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
            "exec", "mobula", "run", "--num-nodes", "3", "--gpus-per-node", "1", "--max-restarts", "2",
            "--checkpoint-url", "s3://b/p", "--resume", "auto", "--save", "/tmp/checkpoints",
            "--", "python", "train.py", "it's", "a b"])
        line = self.job({"verb": "train", "entrypoint": ["--mock-data"]}, NVIDIA)["spec"]["entrypoint"]
        self.assertEqual(shlex.split(line), ["exec", "mobula", "train", "--num-nodes", "3", "--gpus-per-node", "1", "--mock-data"])

    def test_the_command_line_is_one_that_mobula_takes(self):
        """It reads flags from left to right: one that does not exist, put last, is the one it names."""
        for values in ({"checkpoint": {"url": "s3://b/p", "keepLast": 3, "keepLastLocal": 1}, "job": {"maxRestarts": 2}},
                       {"entrypoint": [], "megatronArguments": ["--lr 1", "--save /x"], "remoteCheckpointsPath": "bucket/p"}):
            args, _ = arguments_of(self.job(values))
            args.insert(args.index("--"), "--no-such-flag")
            done = subprocess.run([os.environ["MOBULA_BIN"], *args], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 64)
            self.assertIn("--no-such-flag", done.stderr)

    def test_older_checkpoints_go(self):
        kept = {"keepLast": 5, "keepLastLocal": 2}
        args, _ = arguments_of(self.job({"checkpoint": {"url": "s3://b/p", **kept}}))
        before = args[:args.index("--")]  # words of mobula's, not of the program's
        self.assertEqual(before[before.index("--checkpoint-keep-last") + 1], "5")
        self.assertEqual(before[before.index("--keep-last-k") + 1], "2")
        train = merged(MEGATRON, NVIDIA, {"entrypoint": [], "megatronArguments": ["--mock-data --save /x"],
                                          "remoteCheckpointsPath": "bucket/p", "checkpoint": kept})
        args, _ = arguments_of(self.job(train))
        self.assertEqual(args[0], "train")
        self.assertEqual(args[args.index("--checkpoint-keep-last") + 1], "5")
        self.assertEqual(args[args.index("--keep-last-k") + 1], "2")
        args, _ = arguments_of(self.job({"checkpoint": {"url": "s3://b/p"}}))
        self.assertFalse([word for word in args if "keep-last" in word])

    def test_a_run_goes_on(self):
        def resume(*values):
            args, _ = arguments_of(self.job({"checkpoint": {"url": "s3://b/p"}}, *values))
            return args[args.index("--resume") + 1] if "--resume" in args else None

        native = merged(MEGATRON, NVIDIA, {"megatronArguments": ["--mock-data --save /x"]})
        foreign = merged(MEGATRON, {"megatronArguments": ["--mock-data --save /x"]})
        going_on = merged(MEGATRON, {"megatronArguments": ["--mock-data --save /x --load /x/"]})
        self.assertEqual([resume(v) for v in ({}, native, going_on)], ["auto"] * 3)
        self.assertIsNone(resume(foreign))  # Megatron-LM loads what --load says
        for v in ({}, native, going_on):
            self.assertEqual(resume(v, {"checkpoint": {"resume": "required"}}), "required")
            self.assertIsNone(resume(v, {"checkpoint": {"resume": "never"}}))
        args, _ = arguments_of(self.job(native))
        self.assertNotIn("--resume", args)  # there is no bucket

    def test_ports_probes_and_secrets(self):
        job = self.job(NVIDIA, {"workers": {"env": {"TOKEN": {"name": "s", "key": "k"}, "COUNT": "1"}, "resources": {
            "gpu": 8, "extra": {"vpc.amazonaws.com/efa": 32}}}})
        head, worker = (p["spec"] for p in pods_of(job))
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

    def test_parts_and_transfers(self):
        """Every container that works with the store has them, and the program takes all that the schema lets through."""
        names = ("BUCKET_STORAGE_PART_MIB", "BUCKET_STORAGE_CONCURRENCY")

        def containers(*parts):
            for pod in pods_of(self.job({"checkpoint": {"url": "s3://bucket/p"}, "runTensorboard": True}, *parts)):
                for c in pod["spec"]["containers"]:
                    env = [(e["name"], e.get("value")) for e in c["env"] if e["name"] in names]
                    if any(e["name"] == "BUCKET_STORAGE_HOST" for e in c["env"]):
                        self.assertEqual(len(env), len(dict(env)))  # each is there once
                        yield c["name"], dict(env)

        for checkpoint, want in [
            ({}, {}), ({"partSizeMiB": None, "concurrency": None}, {}), ({"partSizeMiB": 64}, {names[0]: "64"}),
            ({"partSizeMiB": 5, "concurrency": 1}, dict(zip(names, ("5", "1")))),
            ({"partSizeMiB": 5120, "concurrency": 16}, dict(zip(names, ("5120", "16")))),
            ({"concurrency": 8, "env": {names[1]: "2"}}, {names[1]: "2"}),  # what names the variable itself wins
        ]:
            with self.subTest(checkpoint=checkpoint):
                found = list(containers({"checkpoint": checkpoint}))
                self.assertEqual({name for name, _ in found}, {"head", "worker", "tensorboard-upload", "tensorboard-fetch"})
                for _, env in found:
                    self.assertEqual(env, want)
                done = subprocess.run(
                    [os.environ["MOBULA_BIN"], "checkpoint", "ls", "s3://bucket/p"], capture_output=True, text=True, timeout=60,
                    env={**os.environ, **want, "BUCKET_STORAGE_HOST": "http://user@host:1"})  # no endpoint: nothing is asked
                self.assertEqual(done.returncode, 64)
                self.assertIn("S3 endpoint", done.stderr)

    def test_every_pod_knows_its_clocks(self):
        names = {"MOBULA_GRACE_SECONDS", "MOBULA_ACTIVE_DEADLINE_SECONDS", "MOBULA_START_ALLOWANCE_SECONDS",
                 "MOBULA_DEADLINE_MARGIN_SECONDS", "MOBULA_NOTICE_URL"}
        url = "http://169.254.169.254/latest/meta-data/spot/instance-action"
        for job, margin, want in [
            ({}, 0, {"MOBULA_GRACE_SECONDS": "900"}),
            ({"terminationGracePeriodSeconds": 120, "activeDeadlineSeconds": 86400, "noticeUrl": url}, 0,
             {"MOBULA_GRACE_SECONDS": "120", "MOBULA_ACTIVE_DEADLINE_SECONDS": "86400",
              "MOBULA_START_ALLOWANCE_SECONDS": "120", "MOBULA_NOTICE_URL": url}),
            ({"activeDeadlineSeconds": 600}, 300,  # half of them, which is the most
             {"MOBULA_GRACE_SECONDS": "900", "MOBULA_ACTIVE_DEADLINE_SECONDS": "600",
              "MOBULA_START_ALLOWANCE_SECONDS": "120", "MOBULA_DEADLINE_MARGIN_SECONDS": "300"}),
        ]:
            rendered = self.job({"job": job, "checkpoint": {"deadlineMarginSeconds": margin}})
            for pod in pods_of(rendered):
                env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"] if e["name"] in names}
                self.assertEqual(env, want)
                self.assertEqual(str(pod["spec"]["terminationGracePeriodSeconds"]), want["MOBULA_GRACE_SECONDS"])
            self.assertEqual(rendered["spec"].get("activeDeadlineSeconds"), job.get("activeDeadlineSeconds"))
        self.assertIn("noticeUrl", helm(merged(SMALL, {"job": {"noticeUrl": "169.254.169.254"}})).stderr)

    def test_without_a_token_every_pod_says_so(self):
        for mode, want in [("token", []), ("disabled", ["disabled"])]:
            job = self.job({"auth": {"mode": mode}})
            self.assertEqual(job["spec"]["rayClusterSpec"]["authOptions"], {"mode": mode})
            for pod in pods_of(job):
                env = pod["spec"]["containers"][0]["env"]
                self.assertEqual([e["value"] for e in env if e["name"] == "RAY_AUTH_MODE"], want)

    def test_one_node(self):
        job = self.job({"workers": {"replicas": 1, "resources": {"gpu": 0}}})
        self.assertNotIn("workerGroupSpecs", job["spec"]["rayClusterSpec"])
        self.assertNotIn("nvidia.com/gpu", pods_of(job)[0]["spec"]["containers"][0]["resources"]["limits"])

    def test_ranks_of_a_node_without_gpus(self):
        for values, want in [({}, "--ranks-per-node 1"), ({"cpuRanks": 3}, "--ranks-per-node 3")]:
            job = self.job({"workers": {"resources": {"gpu": 0}, **values}})
            self.assertIn(want, job["spec"]["entrypoint"])
        for pod in pods_of(job):
            self.assertEqual(set(pod["spec"]["containers"][0]["resources"]["limits"]), {"cpu", "memory"})
        sizes = {"megatronArguments": ["--micro-batch-size 2 --global-batch-size 8"], "workers": {"replicas": 2, "cpuRanks": 2, "resources": {"gpu": 0}}}
        job = self.job({"entrypoint": []}, sizes)
        self.assertIn("train --num-nodes 2 --gpus-per-node 2", job["spec"]["entrypoint"])
        done = helm(merged(SMALL, {"entrypoint": []}, sizes, {"workers": {"cpuRanks": 3}}))
        self.assertIn("no multiple of 12, --micro-batch-size 2 x 6 ranks", done.stderr)

    def test_submission_modes(self):
        job = self.job({"job": {"submissionMode": "K8sJobMode"}})
        pod = job["spec"]["submitterPodTemplate"]["spec"]
        command = pod["containers"][0]["command"]
        self.assertEqual(command[:3], ["mobula", "job", "submit"])
        self.assertEqual(command[-3:], ["/bin/sh", "-c", job["spec"]["entrypoint"]])
        # Kubernetes replaces $(NAME) in a command: what is the job's own is written so that it stays.
        command = self.job({"job": {"submissionMode": "K8sJobMode"}, "entrypoint": "echo $(date)"})["spec"][
            "submitterPodTemplate"]["spec"]["containers"][0]["command"]
        self.assertIn("$$(date)", command[-1])
        ray = {"head": {"kind": "ray", "image": "ray"}}
        for mode in ("HTTPMode", "K8sJobMode", "SidecarMode"):
            spec = self.job(ray, {"job": {"submissionMode": mode}})["spec"]
            self.assertEqual(spec["submissionMode"], mode)
            self.assertNotIn("submitterPodTemplate", spec)

    def test_a_real_head_does_not_train(self):
        job = self.job({"head": {"kind": "ray", "image": "ray:1"}, "storage": {"ephemeral": {"hostPath": "/x"}}})
        head, worker = (p["spec"] for p in pods_of(job))
        self.assertEqual(job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"], 3)
        self.assertEqual(head["containers"][0]["image"], "ray:1")
        self.assertEqual(set(head["containers"][0]["resources"]["limits"]), {"cpu", "memory"})
        self.assertEqual([v["name"] for v in head["volumes"]], ["shm"])
        self.assertIn("amd.com/gpu", worker["containers"][0]["resources"]["limits"])

    def test_scratch_is_a_pods_own(self):
        """So nothing depends on a shared disk, and what was made for the job goes with its pods."""
        for ephemeral, want, folder in [
            ({}, {"emptyDir": {"sizeLimit": "100Gi"}}, None),
            ({"hostPath": "/ssd"}, {"hostPath": {"path": "/ssd", "type": "DirectoryOrCreate"}}, "$(POD_NAME)"),
            ({"existingClaim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}, "$(POD_NAME)"),
            ({"storageClassName": "s", "accessModes": ["ReadWriteMany"]}, {"persistentVolumeClaim": {"claimName": "mini"}},
             "$(POD_NAME)"),
            ({"storageClassName": "s", "quantity": "1Ti"},
             {"ephemeral": {"volumeClaimTemplate": {"spec": {
                 "storageClassName": "s", "accessModes": ["ReadWriteOnce"],
                 "resources": {"requests": {"storage": "1Ti"}}}}}}, None),
        ]:
            for pod in pods_of(self.job({"storage": {"ephemeral": ephemeral}, "runTensorboard": True})):
                volume, = (v for v in pod["spec"]["volumes"] if v["name"] == "scratch")
                self.assertEqual(volume, {"name": "scratch", **want})
                for c in pod["spec"]["containers"]:
                    mount, = (m for m in c["volumeMounts"] if m["name"] == "scratch")
                    self.assertEqual(mount.get("subPathExpr"), folder)
                    names = [e["name"] for e in c["env"]]
                    self.assertIn("POD_NAME", names)
                    self.assertEqual(len(names), len(set(names)))

    def objects(self, *parts):
        return {d["kind"]: d for d in render(SMALL, *parts)}

    def env_of(self, pod):
        return {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}

    OWNED = {"files": {"train.py": "print(1)\n"}, "storage": {"ephemeral": {
        "storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "quantity": "1Ti"}}}

    def test_objects_that_the_rayjob_owns(self):
        found = self.objects(self.OWNED)
        self.assertEqual(found["ConfigMap"]["data"], {"train.py": "print(1)\n"})
        self.assertEqual(found["PersistentVolumeClaim"]["spec"], {
            "storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}})
        head, worker = pods_of(found["RayJob"])
        rbac = "rbac.authorization.k8s.io/v1"
        owns = {f"configmaps/{found['ConfigMap']['metadata']['name']}",
                f"persistentvolumeclaims/{found['PersistentVolumeClaim']['metadata']['name']}",
                f"serviceaccounts/{found['ServiceAccount']['metadata']['name']}",
                f"{rbac}/roles/{found['Role']['metadata']['name']}",
                f"{rbac}/rolebindings/{found['RoleBinding']['metadata']['name']}"}
        self.assertEqual(set(self.env_of(head)["MOBULA_RAYJOB_OWNS"].split()), owns)
        self.assertEqual(set(found) - {"RayJob"}, {"ConfigMap", "PersistentVolumeClaim", "ServiceAccount", "Role", "RoleBinding"})
        self.assertNotIn("MOBULA_RAYJOB_OWNS", self.env_of(worker))
        for pod in (head, worker):
            self.assertEqual(self.env_of(pod)["MOBULA_RAYJOB"], "mini")
            mount, = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "files")
            self.assertEqual(mount, {"name": "files", "mountPath": "/etc/mobula/files", "readOnly": True})
            volume, = (v for v in pod["spec"]["volumes"] if v["name"] == "files")
            self.assertEqual(volume["configMap"], {"name": "mini-files"})
        rules = {tuple(r["resources"]): (set(r["resourceNames"]), set(r["verbs"])) for r in found["Role"]["rules"]}
        self.assertEqual(rules, {("rayjobs",): ({"mini"}, {"get", "delete"}),
                                 ("configmaps",): ({"mini-files"}, {"patch", "delete"}),
                                 ("persistentvolumeclaims",): ({"mini"}, {"patch", "delete"}),
                                 ("serviceaccounts",): ({"mini"}, {"patch", "delete"}),
                                 ("roles", "rolebindings"): ({"mini"}, {"patch", "delete"})})
        bare = self.job({"serviceAccount": {"create": False}, "rbac": {"create": False}})
        self.assertNotIn("MOBULA_RAYJOB_OWNS", self.env_of(pods_of(bare)[0]))

    MONITORED = {"podMonitor": {"enabled": True, "labels": {"release": "kps"}, "interval": "30s"},
                 "auth": {"mode": "token", "secretName": "ours"}}

    def test_a_podmonitor(self):
        """Of the ports that answer, with what they ask for; it is found by its labels, and goes with the RayJob."""
        self.assertNotIn("PodMonitor", self.objects())
        self.assertNotIn("PodMonitor", self.objects({"podMonitor": {"labels": {"release": "kps"}}}))
        found = self.objects(self.MONITORED)
        monitor = found["PodMonitor"]
        self.assertEqual(monitor["apiVersion"], "monitoring.coreos.com/v1")
        self.assertEqual((monitor["metadata"]["name"], monitor["metadata"]["namespace"]), ("mini", "default"))
        self.assertEqual(monitor["metadata"]["labels"]["release"], "kps")
        self.assertEqual(monitor["spec"]["podMetricsEndpoints"], [{
            "port": "agent", "path": "/metrics", "interval": "30s",
            "authorization": {"credentials": {"name": "ours", "key": "auth_token"}}}])
        rule, = (r for r in found["Role"]["rules"] if r["apiGroups"] == ["monitoring.coreos.com"])
        self.assertEqual((rule["resources"], rule["resourceNames"], rule["verbs"]), (["podmonitors"], ["mini"], ["patch", "delete"]))
        self.assertIn("monitoring.coreos.com/v1/podmonitors/mini", self.env_of(pods_of(found["RayJob"])[0])["MOBULA_RAYJOB_OWNS"])
        for values, containers in [({}, ["agent", "agent"]), ({"head": {"kind": "ray", "image": "ray:1"}}, ["metrics", "agent"])]:
            found = self.objects(self.MONITORED, {"auth": {"mode": "disabled"}, "podMonitor": {"interval": ""}}, values)
            spec = found["PodMonitor"]["spec"]
            for pod, want in zip(pods_of(found["RayJob"]), containers):
                self.assertLessEqual(spec["selector"]["matchLabels"].items(), pod["metadata"]["labels"].items())
                c, = pod["spec"]["containers"]
                scraped = [e["port"] for e in spec["podMetricsEndpoints"] if e["port"] in {p["name"] for p in c["ports"]} and all(
                    re.fullmatch(r["regex"], c["name"]) for r in e.get("relabelings", ()))]
                self.assertEqual(scraped, [want])  # once
            for e in spec["podMetricsEndpoints"]:
                self.assertLessEqual(set(e), {"port", "path", "relabelings"})
                for r in e.get("relabelings", ()):
                    self.assertEqual((r["action"], r["sourceLabels"]), ("keep", ["__meta_kubernetes_pod_container_name"]))
        self.assertNotIn("PodMonitor", {d["kind"] for d in documents(*OVERRIDES[:1], *PREPARE[:1], sets=[
            "podMonitor.enabled=true,auth.mode=disabled"])})

    def test_who_asks_the_api_server(self):
        for values, asks in [({}, [True, False]), ({"head": {"kind": "ray", "image": "ray:1"}}, [False, True])]:
            found = self.objects(values)
            for pod, has_token in zip(pods_of(found["RayJob"]), asks):
                self.assertEqual(pod["spec"]["serviceAccountName"], "mini")
                self.assertIs(pod["spec"]["automountServiceAccountToken"], has_token)
                env = self.env_of(pod)
                self.assertEqual("MOBULA_RAYJOB_DELETE_AFTER_SECONDS" in env, has_token)
                self.assertEqual("MOBULA_RAYJOB_ASKS" in env, has_token and bool(values))
            self.assertEqual(found["RoleBinding"]["subjects"], [
                {"kind": "ServiceAccount", "name": "mini", "namespace": "default"}])
        found = self.objects({"serviceAccount": {"create": False, "name": "theirs"}, "rbac": {"create": False}})
        self.assertEqual(set(found), {"RayJob"})
        self.assertEqual(pods_of(found["RayJob"])[0]["spec"]["serviceAccountName"], "theirs")
        found = self.objects({"serviceAccount": {"create": False}})
        self.assertEqual(found["RoleBinding"]["subjects"][0]["name"], "default")
        found = self.objects({"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:x"}}})
        self.assertEqual(found["ServiceAccount"]["metadata"]["annotations"], {"eks.amazonaws.com/role-arn": "arn:x"})

    def test_who_deletes_the_rayjob(self):
        kueue = {"queue": {"scheduler": "kueue", "name": "q"}}
        for values, by_agent, ttl in [
            ({}, "3600", None), (kueue, "3600", 3660), (merged(kueue, {"job": {"agentDeletes": False}}), None, 3600),
            ({"job": {"agentDeletes": False}}, None, None),
            ({"job": {"deletionRules": [{"policy": "DeleteNone", "condition": {"jobStatus": "FAILED", "ttlSeconds": 1}}]}},
             None, None),
        ]:
            with self.subTest(values=values):
                found = self.objects(values)
                env = self.env_of(pods_of(found["RayJob"])[0])
                self.assertEqual(env.get("MOBULA_RAYJOB_DELETE_AFTER_SECONDS"), by_agent)
                self.assertEqual(found["RayJob"]["spec"].get("ttlSecondsAfterFinished"), ttl)
                verbs = found["Role"]["rules"][0]["verbs"]
                self.assertEqual(verbs, ["get", "delete"] if by_agent else ["get"])

    def test_pods_drain_before_they_end(self):
        for values, seconds in [({}, "894s"), ({"job": {"terminationGracePeriodSeconds": 3}}, "1s")]:
            for pod in pods_of(self.job(values)):
                command = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
                self.assertEqual(command, ["mobula", "drain", "--local", "--wait", "--deadline", seconds, "--reason", "preStop"])
        head, _ = pods_of(self.job({"head": {"kind": "ray", "image": "ray:1"}}))
        self.assertNotIn("lifecycle", head["spec"]["containers"][0])

    def test_megatron_arguments(self):
        def words(**values):
            return arguments_of(self.job(MEGATRON, values))

        args, program = words(megatronArguments=["--lr 1e-5  --bf16", ["--title", "a b"], "--x={{ .Values.tensorboardDir }}"])
        self.assertEqual(program, ["python", "pretrain_gpt.py", "--lr", "1e-5", "--bf16", "--title", "a b", "--x",
                                   "/local_resources/experiment/", "--mock-data", "--local-rank", "0"])
        self.assertEqual(args[:5], ["run", "--num-nodes", "2", "--gpus-per-node", "4"])
        _, program = words(megatronArguments=["--lr=1"], remoteDataDirPath="bucket/d/", remoteDataNamePrefix="name",
                           remoteBaseModelPath="bucket/base/")
        self.assertEqual(program[4:8], ["--data-path", "s3://bucket/d/name", "--load", "s3://bucket/base"])
        _, program = words(megatronArguments=["--data-path 0.5 /local_resources/data/a 0.5 /local_resources/data/b",
                                              "--use-checkpoint-args"], remoteDataDirPath="bucket/d")
        self.assertEqual(program[2:7], ["--data-path", "0.5", "s3://bucket/d/a", "0.5", "s3://bucket/d/b"])
        self.assertNotIn("--use-checkpoint-args", program)
        args, program = arguments_of(self.job(MEGATRON, NVIDIA, {"megatronArguments": ["--lr 1"]}))
        self.assertEqual(args, ["train", "--num-nodes", "2", "--gpus-per-node", "4", "--lr", "1", "--mock-data"])
        self.assertEqual(arguments_of(self.job(MEGATRON, NVIDIA, {"megatronArguments": ["--lr 1"], "verb": "run"}))[0][0], "run")

    def test_an_own_end(self):
        rules = [{"policy": "DeleteNone", "condition": {"jobStatus": "FAILED", "ttlSeconds": 1}}]
        self.assertEqual(self.job({"job": {"deletionRules": rules}})["spec"]["deletionStrategy"]["deletionRules"], rules)

    def test_without_a_release_name_no_two_jobs_are_one(self):
        docs = [render(SMALL, name="release-name") for _ in range(2)]
        names = [{d["metadata"]["name"] for d in some} for some in docs]
        self.assertEqual([len(n) for n in names], [1, 1])  # all of one job are called the same
        self.assertNotEqual(*names)
        for name in names[0] | names[1]:
            self.assertRegex(name, "^mobula-[a-z0-9]{6}$")

    def test_refusals(self):
        import refusals  # which needs what is said above
        said = []
        for values, name, text in refusals.REFUSALS:
            with self.subTest(values=values, name=name):
                done = helm(merged(SMALL, values), name=name)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(text, done.stderr)
                said.append(done.stderr)
        rules = [rule for f in sorted((CHART / "templates").iterdir()) for rule in re.findall(r'fail (?:\(printf )?("(?:[^"\\]|\\.)+")', f.read_text())]
        self.assertGreater(len(rules), 30)
        for rule in rules:
            parts = re.split("%[a-z]", json.loads(rule))
            with self.subTest("every rule is tried", rule=rule):
                self.assertTrue(any(all(part in text for part in parts) for text in said))

    def test_lint(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
            yaml.safe_dump(SMALL, f)
            f.flush()
            done = subprocess.run([HELM, "lint", "--strict", CHART, "--values", f.name],
                                  capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Prepare(unittest.TestCase):
    """Data for training, by a batch Job in the RayJob's place."""

    ARGUMENTS = ["--input {{ .Values.storage.ephemeral.mountPath }}/got.jsonl", ["--output-prefix", "/x/a b"],
                 "--tokenizer-type=NullTokenizer --vocab-size 100"]

    def job(self, *parts, **prepare):
        job, = render({"prepare": merged({"enabled": True, "prepdata": {"arguments": self.ARGUMENTS}}, prepare)}, *parts)
        self.assertEqual((job["apiVersion"], job["kind"], job["metadata"]["name"]), ("batch/v1", "Job", "mini-data"))
        return job

    def test_nothing_but_the_job(self):
        spec = self.job()["spec"]
        pod = spec["template"]["spec"]
        c, = pod["containers"]
        self.assertNotIn("initContainers", pod)
        self.assertEqual(c["command"], ["mobula", "preprocess", "--input", "/local_resources/got.jsonl", "--output-prefix",
                                        "/x/a b", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"])
        self.assertEqual(c["resources"]["limits"], {"cpu": "16", "memory": "32Gi"})
        self.assertEqual((pod["restartPolicy"], pod["serviceAccountName"], pod["automountServiceAccountToken"]),
                         ("OnFailure", "default", False))
        self.assertEqual((spec["backoffLimit"], spec["ttlSecondsAfterFinished"]), (3, 3600))
        env = {e["name"]: e for e in c["env"]}
        self.assertEqual(env["TMPDIR"]["value"], "/local_resources")
        self.assertEqual(env["BUCKET_STORAGE_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"], "minio-credentials")
        c, = self.job({"workerEnvVars": {"TMPDIR": "/x"}})["spec"]["template"]["spec"]["containers"]
        self.assertEqual([e["value"] for e in c["env"] if e["name"] == "TMPDIR"], ["/x"])

    def test_download_comes_first(self):
        for command, want in [("wget -qO- 'x y' >/fsx/a", ["/bin/sh", "-c", "wget -qO- 'x y' >/fsx/a"]), (["a", "b c"], ["a", "b c"])]:
            job = self.job({"storage": {"extraVolumes": [{"name": "fsx", "persistentVolumeClaim": {"claimName": "f"}}],
                                        "extraVolumeMounts": [{"name": "fsx", "mountPath": "/fsx"}]}},
                           getdata={"command": command, "image": "curl:1"}, nodeSelector={"a": "b"})
            pod = job["spec"]["template"]["spec"]
            first, = pod["initContainers"]
            self.assertEqual((first["command"], first["image"]), (want, "curl:1"))
            self.assertEqual([v["name"] for v in pod["volumes"]], ["scratch", "fsx"])
            for c in [first, *pod["containers"]]:
                self.assertEqual([m["name"] for m in c["volumeMounts"]], ["scratch", "fsx"])
            self.assertEqual(pod["nodeSelector"], {"a": "b"})

    def test_it_has_no_claim_of_the_gang(self):
        """Which is made, and deleted, with the RayJob."""
        pod = self.job({"storage": {"ephemeral": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"]}}})["spec"]["template"]["spec"]
        scratch, = pod["volumes"]
        self.assertEqual(scratch["ephemeral"]["volumeClaimTemplate"]["spec"]["storageClassName"], "nfs")

    def test_what_is_missing(self):
        for flag in ("--input", "--output-prefix", "--tokenizer-type"):
            rest = [w for w in ("--input a", "--output-prefix b", "--tokenizer-type c") if not w.startswith(flag)]
            done = helm({"prepare": {"enabled": True, "prepdata": {"arguments": rest}}})
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"have no {flag}", done.stderr)

    def test_its_commands_make_data(self):
        """The commands of both containers, run here one after the other."""
        with tempfile.TemporaryDirectory(prefix="mb-prepare-") as folder:
            pod = self.job({"storage": {"ephemeral": {"mountPath": folder}}},
                           getdata={"command": "printf '{\"text\": \"1 2 3\"}\\n' >\"$TMPDIR/got.jsonl\""},
                           prepdata={"arguments": [*self.ARGUMENTS[:1], f"--output-prefix {folder}/out", self.ARGUMENTS[2]]},
                           )["spec"]["template"]["spec"]
            path = f"{pathlib.Path(os.environ['MOBULA_BIN']).parent}:{os.environ['PATH']}"
            for c in [*pod["initContainers"], *pod["containers"]]:
                env = {e["name"]: e["value"] for e in c["env"] if "value" in e}
                done = subprocess.run(c["command"], env={**env, "PATH": path}, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(pathlib.Path(folder, "out_text_document.bin").stat().st_size, 3 * 2)

    def test_the_example(self):
        self.assertEqual(len(PREPARE), 1)
        job, = documents(CHART / "overrides/values-eks-p5-efa-gpt3.yaml", *PREPARE)
        self.assertEqual(job["kind"], "Job")
        c, = job["spec"]["template"]["spec"]["containers"]
        done = subprocess.run([os.environ["MOBULA_BIN"], *c["command"][1:], "--no-such-flag"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 64)
        self.assertIn("--no-such-flag", done.stderr)
        # What it writes is what the training reads.
        args, _ = arguments_of(render_files(CHART / "overrides/values-eks-p5-efa-gpt3.yaml"))
        prefix = c["command"][c["command"].index("--output-prefix") + 1]
        self.assertEqual(args[args.index("--data-path") + 1], f"{prefix}_text_document")
        for flag in ("--vocab-file", "--merge-file"):
            self.assertEqual(args[args.index(flag) + 1], c["command"][c["command"].index(flag) + 1])


class Golden(unittest.TestCase):
    """The whole of what is rendered, so that no change of it goes unseen. MOBULA_WRITE_GOLDEN=1 writes it anew."""

    def test_manifests(self):
        folder = pathlib.Path(__file__).parent / "golden"
        files = ["values-cpu-smoke", "values-ray-head", "values-llama-8b-2x2-4ddp", "values-eks-p5-efa-gpt3",
                 "values-gke-a3-tcpx-kueue"]
        for f in files:
            with self.subTest(file=f):
                text = yaml.safe_dump_all(documents(CHART / f"overrides/{f}.yaml", name="golden"), width=120)
                if os.environ.get("MOBULA_WRITE_GOLDEN"):
                    (folder / f"{f}.yaml").write_text(text)
                self.assertEqual(text.splitlines(), (folder / f"{f}.yaml").read_text().splitlines())
        self.assertEqual(sorted(p.stem for p in folder.glob("*.yaml")), sorted(files))


class Overrides(unittest.TestCase):
    def test_all_render(self):
        self.assertEqual(len(OVERRIDES), 10)
        for f in OVERRIDES:
            with self.subTest(file=f.name):
                job = render_files(f)
                args, _ = arguments_of(job)
                others = sum(g["replicas"] for g in job["spec"]["rayClusterSpec"].get("workerGroupSpecs", []))
                self.assertEqual(args[1:3], ["--num-nodes", str(others + (f.name != "values-ray-head.yaml"))])
                self.assertIn("--checkpoint-url", args)

    def test_kaiwo(self):
        doc = render_files(OVERRIDES[0], *KAIWO)
        self.assertEqual(doc["kind"], "KaiwoJob")
        inner = doc["spec"]["rayJob"]
        for metadata in (doc["metadata"], inner["metadata"]):
            self.assertEqual(metadata["labels"]["kaiwo.silogen.ai/managed"], "true")
        self.assertTrue(inner["spec"]["shutdownAfterJobFinishes"])
        self.assertNotIn("deletionStrategy", inner["spec"])

    def test_the_smoke_trains(self):
        """Its arguments by the real trainer, one rank of it."""
        args, _ = arguments_of(render_files(CHART / "overrides/values-cpu-smoke.yaml"))
        words = args[args.index("--distributed-backend"):]
        worker = pathlib.Path(os.environ["MOBULA_BIN"]).with_name("mobula-worker")
        with tempfile.TemporaryDirectory(prefix="mb-smoke-") as folder:
            done = subprocess.run([worker, *words, "--save", folder], capture_output=True, text=True, timeout=150,
                                  env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(pathlib.Path(folder, "latest_checkpointed_iteration.txt").read_text().strip(), "20")


@unittest.skipUnless(EXISTING.is_dir(), "no override files of the existing chart beside this checkout (shared/data/chart-overrides)")
class Existing(unittest.TestCase):
    """The override files of the chart that users have, as they are."""

    def test_all_render(self):
        files = [EXISTING / "values.yaml", *sorted((EXISTING / "overrides").glob("*.yaml"))]
        self.assertGreater(len(files), 1)
        added = sorted((EXISTING / "overrides").glob("*/*.yaml"))
        self.assertTrue(added)
        for f, *more in [[f] for f in files] + [[files[0], a] for a in added]:
            with self.subTest(file=f.name, more=more):
                doc = render_files(f, *more)
                values = yaml.safe_load(f.read_text())
                given = " ".join(values["megatronArguments"]).split()
                args, program = arguments_of(rayjob_of(doc))
                self.assertEqual(args[:5], ["run", "--num-nodes", str(values["workers"]["replicas"]),
                                            "--gpus-per-node", str(values["workers"]["resources"]["gpu"])])
                self.assertEqual(program[:2], ["python", "pretrain_gpt.py"])
                flags = [w for w in given if w.startswith("--")]
                if values["remoteBaseModelPath"] is None:
                    flags.remove("--use-checkpoint-args")
                    flags.append("--mock-data")
                self.assertEqual([w for w in program if w.startswith("--")], [*flags, "--local-rank"])
                self.assertEqual(doc["kind"], "KaiwoJob" if more and "enable" in more[0].name else "RayJob")

    def test_the_same_names_here(self):
        theirs = {str(p.relative_to(EXISTING / "overrides")) for p in (EXISTING / "overrides").rglob("*.yaml")}
        self.assertLessEqual(theirs, {str(p.relative_to(CHART / "overrides")) for p in [*OVERRIDES, *KAIWO]})

    def test_two_nodes_with_two_gpus(self):
        docs = documents(EXISTING / "overrides/values-llama-8b-2x2-4ddp.yaml",
                         sets=["image.repository=r/megatron-mobula,image.tag=v1"])
        claim, = (d["spec"] for d in docs if d["kind"] == "PersistentVolumeClaim")
        self.assertEqual(claim, {"storageClassName": "multinode", "accessModes": ["ReadWriteMany"],
                                 "resources": {"requests": {"storage": "100Gi"}}})
        job = job_in(docs)
        args, program = arguments_of(job)
        self.assertEqual(args[args.index("--checkpoint-url") + 1],
                         "s3://default-bucket/experiments/megatron-lm/llama-3.1-8b-cpt-test")
        self.assertEqual(args[args.index("--save") + 1], "/local_resources/checkpoints")
        self.assertIn("--fetch-inputs", args)
        for flag, url in [("--data-path", "datasets/fineweb-edu/fineweb-edu-train_text_document"),
                          ("--tokenizer-model", "models/meta-llama/Llama-3.1-8B"),
                          ("--load", "megatron-models/meta-llama/Llama-3.1-8B")]:
            self.assertEqual(program[program.index(flag) + 1], f"s3://default-bucket/{url}")
        pods = pods_of(job)
        self.assertEqual(len(pods), 2)
        for pod in pods:
            c, = pod["spec"]["containers"]
            self.assertEqual(c["image"], "r/megatron-mobula:v1")
            self.assertEqual(c["resources"]["limits"], {"amd.com/gpu": "2", "cpu": "8", "memory": "100Gi"})
            env = {e["name"]: e for e in c["env"]}
            self.assertEqual(env["NCCL_PROTO"]["value"], "Simple")
            for name, key in [("ACCESS", "access"), ("SECRET", "secret")]:
                self.assertEqual(env[f"BUCKET_STORAGE_{name}_KEY"]["valueFrom"]["secretKeyRef"],
                                 {"name": "minio-credentials", "key": f"minio-{key}-key"})
            volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
            self.assertEqual(volumes["scratch"]["persistentVolumeClaim"], {"claimName": "mini"})
            self.assertEqual(volumes["shm"]["emptyDir"]["sizeLimit"], "32Gi")


class Conform(unittest.TestCase):
    CASES = [{}, {"queue": {"scheduler": "kueue", "name": "q", "topology": {"preferred": "x/y"}}},
             {"queue": {"scheduler": "volcano", "name": "q"}}, {"workers": {"replicas": 1}},
             {"entrypoint": "echo 'a: b' # c", "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
              "job": {"activeDeadlineSeconds": 100, "preRunningDeadlineSeconds": 50, "backoffLimit": 1},
              "workers": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}, "priorityClassName": "p",
                          "podLabels": {"k": "v"}, "podAnnotations": {"k": "v"}},
              "image": {"pullSecrets": ["s"]}, "auth": {"mode": "token", "secretName": "s"}}, {"auth": {"mode": "disabled"}},
             {"job": {"submissionMode": "K8sJobMode"}, "image": {"pullSecrets": ["s"]}, "runTensorboard": True,
              "storage": {"ephemeral": {"existingClaim": "c"}}, "workers": {
                  "hostNetwork": True, "ports": [{"name": "x", "containerPort": 1}], "startParams": {"num-cpus": "8"},
                  "securityContext": {"runAsUser": 0}}}]

    @classmethod
    def setUpClass(cls):
        found = [p for p in CRDS if (p / "ray.io_rayjobs.yaml").exists()]
        if not found:
            raise unittest.SkipTest("KubeRay's definitions are not here: set KUBERAY_CRDS to the folder crd/bases of a KubeRay release")
        crd = load((found[0] / "ray.io_rayjobs.yaml").read_text())
        version, = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
        cls.schemas = tempfile.TemporaryDirectory(prefix="mb-crd-")
        cls.addClassCleanup(cls.schemas.cleanup)
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        pathlib.Path(cls.schemas.name, "rayjob_v1.json").write_text(json.dumps(schema))
        pathlib.Path(cls.schemas.name, "podmonitor_v1.json").write_text(json.dumps(strict(podmonitor.SCHEMA)))

    def conform(self, text):
        return subprocess.run([KUBECONFORM, "-summary", "-strict", "-schema-location",
                               f"{self.schemas.name}/{{{{.ResourceKind}}}}_{{{{.ResourceAPIVersion}}}}.json", "-"],
                              input=text, capture_output=True, text=True, timeout=60)

    def test_rayjobs_conform(self):
        for case in self.CASES:
            with self.subTest(case=case):
                done = self.conform(yaml.safe_dump(job_in(render(SMALL, case))))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("Valid: 1", done.stdout)

    def test_podmonitors_conform(self):
        for values in ({}, {"head": {"kind": "ray", "image": "ray:1"}}):
            monitor, = (d for d in render(SMALL, Render.MONITORED, values) if d["kind"] == "PodMonitor")
            done = self.conform(yaml.safe_dump(monitor))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("Valid: 1", done.stdout)
            monitor["spec"]["podMetricsEndpoints"][0]["ports"] = []
            self.assertNotEqual(self.conform(yaml.safe_dump(monitor)).returncode, 0)

    def test_overrides_conform(self):
        existing = sorted((EXISTING / "overrides").glob("*.yaml"))
        for files in [[f] for f in OVERRIDES + existing] + [[OVERRIDES[0], *KAIWO]]:
            with self.subTest(files=files):
                done = self.conform(yaml.safe_dump(rayjob_of(render_files(*files))))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("Valid: 1", done.stdout)

    def test_a_wrong_field_is_seen(self):
        job = job_in(render(SMALL))
        job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containerz"] = []
        self.assertNotEqual(self.conform(yaml.safe_dump(job)).returncode, 0)


if __name__ == "__main__":
    unittest.main()

"""What clouds add to the chart: values of the GKE NeMo chart, fast networks, TensorBoard. The commands of TensorBoard's
containers run here, with a real S3 server, the real trainer and the real TensorBoard."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request

import yaml

import s3
import test_chart as chart
from cluster import Cluster, wait_until

# As Google's guide prints it.
NEMO = """
queue: null

volumes:
  nfsMountPath: null
  ssdMountPath: "/ssd"
  gcsDownload:
    source: "gs://nemo-megatron-demo/training-data/tokenized/bpe2gpt/wikipedia"
    target: "/ssd/.cache/"

workload:
  image: "$REGION-docker.pkg.dev/$PROJECT/$PREFIX/nemofw-training:23.05-py3"
  torchDistributedTarget: "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"

  gpus: 16
  arguments:
  - name: "exp_manager.exp_dir"
    value: "/tmp/nemo-experiments/"
  - name: "data.data_prefix"
    value: "[1.0,/ssd/.cache/wikipedia/wikipedia-tokenized-for-gpt2]"
"""


# In place of NeMo's: it says what it was given, as a rank that finds the others by MASTER_ADDR and MASTER_PORT.
TARGET = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
print("given", json.dumps([sys.argv[1:], {n: os.environ[n] for n in names}]), flush=True)
"""


class Nemo(unittest.TestCase):
    def job(self, *more):
        return chart.job_in(chart.render(yaml.safe_load(NEMO), *more))

    def test_as_it_is_printed(self):
        job = self.job()
        args, program = chart.arguments_of(job)
        self.assertEqual(args[:5], ["run", "--num-nodes", "2", "--gpus-per-node", "8"])
        self.assertEqual(program, [
            "env", "LOCAL_RANK=0", "python", "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py",
            "++trainer.num_nodes=16", "++trainer.devices=1", "+exp_manager.exp_dir=/tmp/nemo-experiments/",
            "+data.data_prefix=[1.0,/ssd/.cache/wikipedia/wikipedia-tokenized-for-gpt2]"])
        self.assertNotIn("suspend", job["spec"])
        for pod in chart.pods_of(job):
            c, = pod["spec"]["containers"]
            self.assertEqual(c["resources"]["limits"]["nvidia.com/gpu"], "8")
            self.assertTrue(c["image"].endswith("nemofw-training:23.05-py3"))
            first, = pod["spec"]["initContainers"]
            self.assertEqual(first["command"], [
                "mobula", "checkpoint", "pull", "--plain", "s3://nemo-megatron-demo/training-data/tokenized/bpe2gpt/wikipedia",
                "/ssd/.cache/"])
            self.assertIn({"name": "BUCKET_STORAGE_HOST", "value": "https://storage.googleapis.com"}, first["env"])
            scratch, = (m for m in c["volumeMounts"] if m["name"] == "scratch")
            self.assertEqual(scratch["mountPath"], "/ssd")
            self.assertIn(scratch, first["volumeMounts"])

    def test_its_program_runs(self):
        """The RayJob's line at a head, as KubeRay gives it: every rank has its own GPU and the chart's arguments."""
        with Cluster(nodes=2, start_args=["--num-gpus", "2"], env={"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}) as cluster:
            target = pathlib.Path(cluster.dir, "megatron_gpt_pretraining.py")
            target.write_text(TARGET)
            line = self.job({"workload": {"gpus": 4, "nodes": 2, "torchDistributedTarget": str(target)}})["spec"]["entrypoint"]
            cluster.submit(line, submission_id="nemo")
            job = cluster.wait_job("nemo")
            log = cluster.logs("nemo")
        self.assertEqual(job["status"], "SUCCEEDED", log)
        words, given = zip(*(json.loads(text) for text in re.findall(r"given (\[.*\])$", log, re.M)))
        self.assertEqual(words, 4 * (["++trainer.num_nodes=4", "++trainer.devices=1", "+exp_manager.exp_dir=/tmp/nemo-experiments/",
                                      "+data.data_prefix=[1.0,/ssd/.cache/wikipedia/wikipedia-tokenized-for-gpt2]"],))
        self.assertEqual({(g["NODE_RANK"], g["CUDA_VISIBLE_DEVICES"], g["LOCAL_RANK"], g["WORLD_SIZE"]) for g in given},
                         {(node, gpu, "0", "4") for node in "01" for gpu in "01"})
        self.assertEqual({g["RANK"] for g in given}, set("0123"))
        self.assertEqual(len({(g["MASTER_ADDR"], g["MASTER_PORT"]) for g in given}), 1)

    def test_a_queue_and_other_sizes(self):
        job = self.job({"queue": "a4-high", "workload": {"nodes": 4}})
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "a4-high")
        self.assertTrue(job["spec"]["suspend"])
        self.assertEqual(chart.arguments_of(job)[0][:5], ["run", "--num-nodes", "4", "--gpus-per-node", "4"])
        args, program = chart.arguments_of(self.job({"workload": {"gpus": 3, "arguments": [
            {"name": "a", "value": 1000000}, {"name": "+b", "value": True}, {"name": "~c", "value": "x y"}]}}))
        self.assertEqual(args[:5], ["run", "--num-nodes", "1", "--gpus-per-node", "3"])
        self.assertEqual(program[-3:], ["+a=1000000", "+b=true", "~c=x y"])

    def test_buckets_of_google(self):
        host = {"logistics": {"envVars": {"BUCKET_STORAGE_HOST": "https://storage.googleapis.com"}}}
        args, _ = chart.arguments_of(self.job({"remoteCheckpointsPath": "gs://bucket/run"}, host))
        self.assertEqual(args[args.index("--checkpoint-url") + 1], "s3://bucket/run")

    def test_volumes_and_configuration(self):
        """Also as the later editions of that chart have them."""
        job = self.job({"volumes": {"nfsMountPath": "/nfs", "gcsDownload": None, "pvcMounts": [{"name": "cluster-gcsfuse", "mountPath": "/gcs"}]},
                        "gcsDownload": {"source": "gs://b/c/", "target": "/gcs/x"}, "files": {"nemo-configuration.yaml": "a: 1\n"},
                        "workload": {"embeddedTensorboardTarget": "/nfs/nemo-experiments"}})
        head, worker = (p["spec"] for p in chart.pods_of(job))
        claims = {v["persistentVolumeClaim"]["claimName"] for v in worker["volumes"] if "persistentVolumeClaim" in v}
        self.assertEqual(claims, {"cluster-filestore", "cluster-gcsfuse"})
        for c in worker["containers"][0], worker["initContainers"][0]:
            self.assertLessEqual({"/nfs", "/gcs", "/ssd"}, {m["mountPath"] for m in c["volumeMounts"]})
        self.assertEqual(worker["initContainers"][0]["command"][-2:], ["s3://b/c", "/gcs/x"])
        self.assertEqual(chart.arguments_of(job)[1][4:6], ["--config-path=/etc/mobula/files", "--config-name=nemo-configuration.yaml"])
        self.assertEqual([c["name"] for c in head["containers"]], ["head", "tensorboard"])
        self.assertIn("/nfs/nemo-experiments", head["containers"][1]["command"])
        self.assertEqual([c["name"] for c in worker["containers"]], ["worker"])


class Network(unittest.TestCase):
    def pod(self, *parts):
        return chart.pods_of(chart.job_in(chart.render(chart.SMALL, chart.NVIDIA, *parts)))[1]["spec"]

    def env(self, pod):
        return {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}

    def test_efa(self):
        for kind, n in [("p5.48xlarge", "32"), ("p5e.48xlarge", "32"), ("p5en.48xlarge", "16"), ("p6-b200.48xlarge", "8")]:
            pod = self.pod({"network": {"preset": "efa"}, "workers": {"nodeSelector": {"node.kubernetes.io/instance-type": kind}}})
            self.assertEqual(pod["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"], n)
            self.assertEqual(self.env(pod)["FI_PROVIDER"], "efa")
        pod = self.pod({"network": {"preset": "efa"}, "workers": {
            "resources": {"extra": {"vpc.amazonaws.com/efa": 1}}, "env": {"FI_PROVIDER": "x"}}})
        self.assertEqual(pod["containers"][0]["resources"]["requests"]["vpc.amazonaws.com/efa"], "1")
        self.assertEqual(self.env(pod)["FI_PROVIDER"], "x")

    def test_tcpx(self):
        pod = self.pod({"network": {"preset": "tcpx"}, "workers": {"env": {"NCCL_CROSS_NIC": "1"}, "sidecars": [{"name": "mine"}]}})
        self.assertTrue(pod["hostNetwork"])
        self.assertEqual([c["name"] for c in pod["containers"]], ["worker", "mine", "tcpx-daemon"])
        self.assertTrue(pod["containers"][2]["securityContext"]["privileged"])
        for c in pod["containers"][0], pod["containers"][2]:
            self.assertLessEqual({"nvidia", "tcpx"}, {m["name"] for m in c["volumeMounts"]})
        self.assertEqual((self.env(pod)["NCCL_CROSS_NIC"], self.env(pod)["NCCL_SOCKET_IFNAME"]), ("1", "eth0"))

    def test_rdma_and_further_containers(self):
        pod = self.pod({"network": {"preset": "rdma", "initContainers": [{"name": "first"}], "sidecars": [{"name": "beside"}]},
                        "workers": {"securityContext": {"runAsUser": 0, "capabilities": {"add": ["SYS_NICE"]}}}})
        self.assertEqual(pod["containers"][0]["securityContext"],
                         {"runAsUser": 0, "capabilities": {"add": ["SYS_NICE", "IPC_LOCK"]}})
        self.assertEqual(([c["name"] for c in pod["initContainers"]], [c["name"] for c in pod["containers"]]),
                         (["first"], ["worker", "beside"]))
        self.assertNotIn("securityContext", self.pod()["containers"][0])


class Job(unittest.TestCase):
    def test_further_keys(self):
        job = chart.job_in(chart.render(chart.SMALL, {
            "queue": {"scheduler": "kueue", "name": "q", "maxExecSeconds": 3600},
            "job": {"runtimeEnv": {"env_vars": {"A": "$(b) 'c'"}}, "submissionMode": "K8sJobMode"}}))
        self.assertEqual(job["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"], "3600")
        self.assertEqual(yaml.safe_load(job["spec"]["runtimeEnvYAML"]), {"env_vars": {"A": "$(b) 'c'"}})
        command = job["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["command"]
        given = command[command.index("--runtime-env-json") + 1].replace("$$(", "$(")  # as Kubernetes does
        self.assertEqual(json.loads(given), {"env_vars": {"A": "$(b) 'c'"}})

    def test_what_is_said_of_the_job(self):
        job = chart.job_in(chart.render(chart.SMALL, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}, "job": {
            "activeDeadlineSeconds": 600, "preRunningDeadlineSeconds": 60, "backoffLimit": 3}, "workers": {"startParams": {"num-cpus": "4"}}}))
        self.assertEqual(job["metadata"]["labels"]["team"], "a")
        self.assertEqual(job["metadata"]["annotations"], {"note": "b"})
        self.assertEqual([job["spec"][k] for k in ("activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit")], [600, 60, 3])
        cluster = job["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            self.assertEqual(group["rayStartParams"], {"num-cpus": "4"})

    def job(self, *parts):
        return chart.job_in(chart.render(chart.SMALL, *parts))

    def test_nothing_behind_a_key(self):
        """Where all that stood there is commented out."""
        job = self.job({"workerEnvVars": None, "logistics": {"envVars": None}, "workers": {
            "env": None, "sidecars": None, "tolerations": None, "nodeSelector": None, "ports": None}, "files": None, "metadata": None})
        names = [e["name"] for e in chart.pods_of(job)[0]["spec"]["containers"][0]["env"]]
        self.assertFalse([n for n in names if not n.startswith(("MOBULA_", "POD_"))])
        efa = {"network": {"preset": "efa"}, "workers": {"env": None, "sidecars": None, "nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
                                                         "resources": {"extra": None}}}
        tcpx = {"network": {"preset": "tcpx"}, "workers": {"env": None, "sidecars": None}, "storage": {"extraVolumes": None, "extraVolumeMounts": None}}
        rdma = {"network": {"preset": "rdma"}, "workers": {"securityContext": None}, "queue": {"topology": None}, "workload": None}
        claim = {"volumes": {"pvcMounts": [{"name": "c", "mountPath": "/c"}]}, "storage": {"extraVolumes": None, "extraVolumeMounts": None}}
        for values in ({"workers": {"startParams": None}}, efa, tcpx, rdma, claim, chart.merged(tcpx, claim)):
            with self.subTest(values=values):
                job = self.job(values)
                for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
                    self.assertEqual(group["rayStartParams"], {})
                self.check_names(job)

    def check_names(self, job):
        """The API server refuses a pod with two of a name."""
        for pod in chart.pods_of(job):
            for named in (pod["spec"]["volumes"], pod["spec"]["containers"], *(c.get("env", []) for c in pod["spec"]["containers"])):
                names = [x["name"] for x in named]
                self.assertEqual(sorted(names), sorted(set(names)))

    def test_names_that_the_chart_does_not_use(self):
        """With these values: others may."""
        env = {"MOBULA_NOTICE_URL": "http://x", "MOBULA_DEADLINE_MARGIN_SECONDS": "30", "MOBULA_ACTIVE_DEADLINE_SECONDS": "600",
               "MOBULA_START_ALLOWANCE_SECONDS": "5", "RAY_AUTH_MODE": "token"}
        margin = {"MOBULA_DEADLINE_MARGIN_SECONDS": "30"}
        for values, want in [({"workers": {"env": env}}, env), ({"workers": {"env": margin}, "job": {"activeDeadlineSeconds": 600}}, margin),
                             ({"workerEnvVars": {"MOBULA_RAYJOB_OWNS": "x"}, "serviceAccount": {"create": False}, "rbac": {"create": False}},
                              {"MOBULA_RAYJOB_OWNS": "x"})]:
            job = self.job(values)
            self.check_names(job)
            for pod in chart.pods_of(job):
                has = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
                self.assertEqual({k: has.get(k) for k in want}, want)
        volumes = [{"name": n, "emptyDir": {}} for n in ("files", "tensorboard", "nvidia", "shared")]
        for values in ({}, {"runTensorboard": True}, {"runTensorboard": True, "checkpoint": {"url": "s3://b/p"}, "head": {"kind": "ray", "image": "ray:1"}}):
            job = self.job({"storage": {"extraVolumes": volumes}}, values)
            self.check_names(job)
            self.assertEqual(chart.pods_of(job)[1]["spec"]["volumes"][-4:], volumes)

    def test_what_kuberay_sets_itself(self):
        """KubeRay's own values, as its samples have them."""
        params = {"dashboard-host": "0.0.0.0", "block": "true", "num-cpus": "4"}
        job = self.job({"workers": {"startParams": params}})
        for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
            self.assertEqual(group["rayStartParams"], params)

    def test_shared_memory_and_slashes(self):
        """A size that nothing needs may be left out, and a store's key may have an empty part."""
        for values, want in [({"sizeLimit": None, "hostPath": "/dev/shm"}, {"hostPath": {"path": "/dev/shm", "type": "Directory"}}),
                             ({"sizeLimit": None}, {"emptyDir": {"medium": "Memory"}}), ({}, {"emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}})]:
            job = self.job({"storage": {"dshm": values}, "checkpoint": {"url": "s3://b//p//q/"}})
            for pod in chart.pods_of(job):
                self.assertEqual(pod["spec"]["volumes"][0], {"name": "shm", **want})
            args, _ = chart.arguments_of(job)
            self.assertEqual(args[args.index("--checkpoint-url") + 1], "s3://b//p//q/")

    def test_images_and_amounts(self):
        for image, want in [({"repository": "r"}, "r:0.1.0"), ({"repository": "h:5000/r", "tag": "7"}, "h:5000/r:7"),
                            ({"repository": "h:5000/r:1"}, "h:5000/r:1"), ({"repository": f"r@sha256:{64 * 'a'}"}, f"r@sha256:{64 * 'a'}")]:
            job = self.job({"image": image, "workers": {"resources": {"cpu": 8, "memory": 107374182400, "extra": {"a.b/c": 10000000}}}})
            for pod in chart.pods_of(job):
                c, = pod["spec"]["containers"]
                self.assertEqual(c["image"], want)
                self.assertEqual(c["resources"]["limits"], {"amd.com/gpu": "1", "cpu": "8", "memory": "107374182400", "a.b/c": "10000000"})

    PLACED = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "gpu", "operator": "Exists"}], "priorityClassName": "high", "hostNetwork": True,
              "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}}}

    def test_what_is_said_of_pods(self):
        """Is in each that trains, with every kind of volume; a real Ray head has none of it."""
        volumes = [{"name": "nfs", "nfs": {"server": "s", "path": "/p"}}, {"name": "ssd", "hostPath": {"path": "/mnt/disks/0"}},
                   {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "b"}}},
                   {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}}]
        mounts = [{"name": v["name"], "mountPath": f"/{v['name']}"} for v in volumes]
        values = {"workers": {**self.PLACED, "podLabels": {"k": "v"}, "podAnnotations": {"x": "z"}, "ports": [{"name": "more", "containerPort": 9}]},
                  "storage": {"extraVolumes": volumes, "extraVolumeMounts": mounts, "dshm": {"hostPath": "/dev/shm"}},
                  "image": {"repository": "r", "tag": "1", "pullPolicy": "Always", "pullSecrets": ["s"]}}
        for more in ({}, {"head": {"kind": "ray", "image": "ray:1"}}):
            pods = chart.pods_of(chart.job_in(chart.render(chart.SMALL, values, more)))
            for pod in pods[1:] if more else pods:
                spec, c = pod["spec"], pod["spec"]["containers"][0]
                self.assertEqual({k: spec[k] for k in self.PLACED}, self.PLACED)
                self.assertEqual(spec["dnsPolicy"], "ClusterFirstWithHostNet")
                self.assertEqual((pod["metadata"]["labels"]["k"], pod["metadata"]["annotations"]), ("v", {"x": "z"}))
                self.assertEqual((c["image"], c["imagePullPolicy"], spec["imagePullSecrets"]), ("r:1", "Always", [{"name": "s"}]))
                self.assertEqual(spec["volumes"][-4:], volumes)
                self.assertEqual(c["volumeMounts"][-4:], mounts)
                shm = next(v for v in spec["volumes"] if v["name"] == "shm")
                self.assertEqual(shm["hostPath"]["path"], "/dev/shm")
                self.assertIn({"name": "more", "containerPort": 9}, c["ports"])
                for probe in ("readinessProbe", "livenessProbe"):  # ours, so that KubeRay adds none that need wget
                    self.assertEqual(c[probe]["httpGet"], {"path": "/api/healthz", "port": 52365})
            if more:
                self.assertFalse(set(self.PLACED) & set(pods[0]["spec"]))
                self.assertEqual([v["name"] for v in pods[0]["spec"]["volumes"]], ["shm"])
                self.assertIn("emptyDir", pods[0]["spec"]["volumes"][0])


class TensorBoard(unittest.TestCase):
    STORE = {"runTensorboard": True, "checkpoint": {"url": "s3://b/p/"}}

    def names(self, *parts):
        docs = chart.render(chart.SMALL, *parts)
        service = next((d for d in docs if d["kind"] == "Service"), None)
        pods = chart.pods_of(chart.job_in(docs))
        return service, pods, [[c["name"] for c in p["spec"]["containers"][1:]] for p in pods]

    def test_who_shows_what(self):
        shared = {"storage": {"extraVolumes": [{"name": "nfs", "persistentVolumeClaim": {"claimName": "c"}}],
                              "extraVolumeMounts": [{"name": "nfs", "mountPath": "/nfs/"}]}, "tensorboardDir": "/nfs"}
        for parts, containers, has_service, logdir in [
            ([self.STORE], [["tensorboard-upload", "tensorboard-fetch", "tensorboard"], ["tensorboard-upload"]], True, "/tensorboard"),
            ([self.STORE, {"head": {"kind": "ray", "image": "r"}}], [["tensorboard-fetch", "tensorboard"], ["tensorboard-upload"]], True,
             "/tensorboard"),
            ([self.STORE, shared], [["tensorboard"], []], True, "/nfs"),
            ([{"runTensorboard": True}], [["tensorboard"], ["tensorboard"]], False, "/local_resources/experiment/"),
            ([{"runTensorboard": True, "workers": {"replicas": 1}}], [["tensorboard"]], True, "/local_resources/experiment/"),
            ([{}], [[], []], False, None),
        ]:
            with self.subTest(parts=parts):
                service, pods, found = self.names(*parts)
                self.assertEqual(found, containers)
                self.assertEqual(service is not None, has_service)
                for pod in pods:
                    for c in pod["spec"]["containers"][1:]:
                        self.assertLessEqual({m["name"] for m in c["volumeMounts"]}, {v["name"] for v in pod["spec"]["volumes"]})
                        if c["name"] == "tensorboard":
                            self.assertEqual(c["command"][2], logdir)

    def test_the_service_finds_the_head(self):
        """By what KubeRay and the chart write on the head's pod, and no other's."""
        docs = chart.render(chart.SMALL, self.STORE)
        service, = (d for d in docs if d["kind"] == "Service")
        head, worker = chart.pods_of(chart.job_in(docs))
        for pod, kind in (head, "head"), (worker, "worker"):
            labels = {**pod["metadata"]["labels"], "app.kubernetes.io/name": "kuberay", "ray.io/node-type": kind}
            self.assertEqual(service["spec"]["selector"].items() <= labels.items(), kind == "head")
        port, = service["spec"]["ports"]
        named = {p["name"]: p["containerPort"] for p in head["spec"]["containers"][-1]["ports"]}
        self.assertEqual(named[port["targetPort"]], 6006)
        env = {e["name"]: e.get("value", "") for e in head["spec"]["containers"][0]["env"]}
        self.assertIn("services/mini-tensorboard", env["MOBULA_RAYJOB_OWNS"].split())
        role, = (d for d in docs if d["kind"] == "Role")
        self.assertIn({"apiGroups": [""], "resources": ["services"], "resourceNames": ["mini-tensorboard"],
                       "verbs": ["patch", "delete"]}, role["rules"])

    def test_the_arguments_name_the_directory(self):
        values = {"runTensorboard": True, "megatronArguments": ["--lr 1", "--save /local_resources/c"]}
        for part in (chart.MEGATRON, chart.merged(chart.MEGATRON, chart.NVIDIA)):
            words, _ = chart.arguments_of(chart.job_in(chart.render(part, values)))
            self.assertEqual(words[words.index("--tensorboard-dir") + 1], "/local_resources/experiment/")

    # ---- the commands of its containers ----

    def start(self, c, env, *changes):
        command = c["command"]
        for old, new in changes:
            self.assertTrue(any(old in word for word in command), old)
            command = [word.replace(old, new) for word in command]
        p = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             start_new_session=True)
        self.addCleanup(self.end, p)
        return p

    def end(self, p):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        p.stdout.close()

    def test_events_of_a_training_are_seen_at_the_head(self):
        top = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-tb-")))
        port = self.enterContext(s3.server(top))
        agent = self.enterContext(socket.create_server(("127.0.0.1", 0)))
        node, head = top / "node", top / "head"
        docs = chart.documents(chart.CHART / "overrides/values-cpu-smoke.yaml", sets=[
            "runTensorboard=true", f"storage.ephemeral.mountPath={node}", f"tensorboardDir={node}/experiment",
            f"remoteCheckpointsPath={s3.BUCKET}/run"])
        job = chart.job_in(docs)
        first, second = ({c["name"]: c for c in p["spec"]["containers"]} for p in chart.pods_of(job))
        env = {**{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BUCKET_"))}, **s3.environment(port),
               "PATH": f"{pathlib.Path(os.environ['MOBULA_BIN']).parent}:{os.environ['PATH']}"}
        quick = ("sleep 60", "sleep 0.3")
        upload = self.start(second["tensorboard-upload"], env, quick, ("127.0.0.1/52365", f"127.0.0.1/{agent.getsockname()[1]}"))
        self.start(first["tensorboard-fetch"], env, quick, (" /tensorboard ", f" {head} "))
        args, _ = chart.arguments_of(job)
        words = args[args.index("--distributed-backend"):]
        done = subprocess.run([pathlib.Path(os.environ["MOBULA_BIN"]).with_name("mobula-worker"), *words, "--save", top / "ckpt"],
                              capture_output=True, text=True, timeout=150, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        written, = (node / "experiment").glob("events.out.tfevents.*")

        def is_same():
            with contextlib.suppress(FileNotFoundError):
                return (head / written.name).read_bytes() == written.read_bytes()

        wait_until(is_same, "the head has the events", 120)
        # The pod ends: what is written until its agent ends goes out, too.
        upload.send_signal(signal.SIGTERM)
        with self.assertRaises(subprocess.TimeoutExpired):
            upload.wait(2)
        (node / "experiment" / "last").write_text("written after SIGTERM")
        agent.close()
        self.assertEqual(upload.wait(60), 0, upload.stdout.read())
        wait_until(lambda: (head / "last").exists(), "the last file", 120)
        self.check_shown(first["tensorboard"], env, head)

    def check_shown(self, c, env, folder):
        """By the real TensorBoard, which the image has as a program."""
        self.assertEqual(c["command"][0], "tensorboard")
        python = os.environ.get("MOBULA_TOK_PYTHON", str(chart.CACHE / "venv-tok/bin/python"))
        words = [python, "-m", "tensorboard.main", *c["command"][1:]]
        p = self.start({"command": words}, env, ("/tensorboard", str(folder)), ("6006", "0"))
        said = ""
        while not (found := re.search(r"http://\S+?:(\d+)/", said)):
            line = p.stdout.readline()
            self.assertTrue(line, said)
            said += line
        port = found[1]
        drain = threading.Thread(target=p.stdout.read, daemon=True)
        drain.start()

        def tags():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=30) as reply:
                return {tag for run in json.load(reply).values() for tag in run}

        wait_until(lambda: "lm loss" in tags(), "TensorBoard has read the events", 120)
        self.end(p)


if __name__ == "__main__":
    unittest.main()

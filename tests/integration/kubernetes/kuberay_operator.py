"""What KubeRay's operator does with a RayJob, by the rules that were read in its source and seen at 1.7: its states, clocks
and calls, and who posts the job. The pods are those of kuberay_pods.py. For tests: it works with the API server as the operator does and keeps nothing itself.

    "" -> Initializing -> Running -> Complete | Failed | Retrying -> ""; Suspending -> Suspended -> ""

Known by name and not here: InteractiveMode, preRunningDeadlineSeconds, a Redis behind the GCS, autoscaling.
"""

import base64
import calendar
import contextlib
import http.client
import json
import secrets
import string
import threading
import time

import kuberay_pods
from fake_api import stamp

REQUEUE_S = 1.0  # 3 s in the operator: an end is seen that much earlier here
REQUEST_S = 2  # for an answer of the head
SUBMITTER_S = 30  # after its submitter a job has so long to be over
FINALIZER = "ray.io/rayjob-finalizer"
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")


def random_name(n):
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(n))


def seconds_of(text):
    """Unix time of an API server's time."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


class Operator:
    """Of one namespace. `posts` are the jobs that it has posted, `stops` those that it has asked to stop, in order."""

    def __init__(self, plane, namespace):
        self.plane, self.namespace = plane, namespace
        self.posts, self.stops = [], []
        self.stopping, self.fault = threading.Event(), None
        self.STATES = {"": self.new, "Initializing": self.initializing, "Running": self.running, "Suspending": self.release,
                       "Retrying": self.release, "Suspended": self.suspended, "Complete": self.ended, "Failed": self.ended}

    def __enter__(self):
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join()
        if self.fault:
            raise self.fault

    def loop(self):
        while not self.stopping.wait(REQUEUE_S):
            try:
                for job in self.plane.ok("GET", self.plane.path("RayJob", self.namespace))["items"]:
                    self.reconcile(job)
            except Exception as fault:  # the test is told at its end
                self.fault = fault
                raise

    def note(self, job, text):
        print(f"{time.strftime('%H:%M:%S')} {job['metadata']['name']}: {text}", flush=True)

    # ---- the RayJob ----

    def reconcile(self, job):
        status = dict(job.get("status") or {})
        if "deletionTimestamp" in job["metadata"]:
            self.finalize(job, status)
            return
        before = dict(status)
        state = status.setdefault("jobDeploymentStatus", "")
        cluster = self.cluster_of(status)
        if cluster and "deletionTimestamp" not in cluster["metadata"] and state in ("Initializing", "Running", "Complete", "Failed"):
            self.keep_pods(job, cluster)
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # asked again at the next turn
            self.STATES[state](job, status)
        if status.get("jobDeploymentStatus") == "Failed" and state != "Failed":
            status["failed"] = status.get("failed", 0) + 1
            if status["failed"] <= job["spec"].get("backoffLimit", 0) and status.get("reason") != "DeadlineExceeded":
                status["jobDeploymentStatus"] = "Retrying"
        if status.get("jobDeploymentStatus") in ("Complete", "Failed") and state not in ("Complete", "Failed"):
            status["endTime"] = stamp(time.time())
        if status != before:
            if status["jobDeploymentStatus"] != state:
                self.note(job, f"{state or 'new'} -> {status['jobDeploymentStatus'] or 'new'} {status.get('reason', '')}")
            path = self.plane.path("RayJob", self.namespace, job["metadata"]["name"]) + "/status"
            gone = {k: None for k in before if k not in status}
            self.plane.call("PATCH", path, {"status": {**status, **gone}}, kind="application/merge-patch+json")

    def finalize(self, job, status):
        """One request to stop, whatever becomes of it."""
        if FINALIZER not in job["metadata"].get("finalizers", []):
            return
        if status.get("jobStatus") not in TERMINAL and status.get("dashboardURL"):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.stops.append(status["jobId"])
                self.ask(job, status, "POST", f"/api/jobs/{status['jobId']}/stop")
        self.note(job, "is deleted")
        self.patch(job, {"metadata": {"finalizers": []}})

    def patch(self, job, body):
        self.plane.ok("PATCH", self.plane.path("RayJob", self.namespace, job["metadata"]["name"]), body, kind="application/merge-patch+json")

    # ---- states: each may change status ----

    def new(self, job, status):
        name = job["metadata"]["name"]
        if job["spec"].get("suspend"):
            status["jobDeploymentStatus"] = "Suspended"
            return
        self.patch(job, {"metadata": {"finalizers": [FINALIZER]}})
        status.update(jobDeploymentStatus="Initializing", jobId=f"{name}-{random_name(5)}", rayClusterName=f"{name}-{random_name(5)}",
                      startTime=stamp(time.time()))

    def is_over(self, job, status):
        """Suspended, or later than its active deadline: in this order."""
        limit = job["spec"].get("activeDeadlineSeconds")
        if job["spec"].get("suspend"):
            status["jobDeploymentStatus"] = "Suspending"
        elif limit and time.time() > seconds_of(status["startTime"]) + limit:
            status.update(jobDeploymentStatus="Failed", reason="DeadlineExceeded")
        return status["jobDeploymentStatus"] not in ("Initializing", "Running")

    def initializing(self, job, status):
        if self.is_over(job, status):
            return
        cluster = self.cluster_of(status) or self.make_cluster(job, status)
        spec = cluster["spec"]
        wanted = 1 + sum(g["replicas"] for g in spec.get("workerGroupSpecs", []))
        pods = [p for p in self.pods_of(cluster) if self.is_ready(p)]
        if len(pods) == wanted:
            service = self.plane.ok("GET", self.plane.path("Service", self.namespace, f"{cluster['metadata']['name']}-head-svc"))
            port = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "dashboard")
            dashboard = f"{service['metadata']['name']}.{self.namespace}.svc.cluster.local:{port}"
            if job["spec"]["submissionMode"] == "K8sJobMode" and self.submitter_job(job) is None:
                self.create(kuberay_pods.submitter_job(job, cluster["metadata"]["name"], status["jobId"], dashboard), job)
            status.update(jobDeploymentStatus="Running", dashboardURL=dashboard)

    def running(self, job, status):
        if self.is_over(job, status):
            return
        is_posted_here = job["spec"]["submissionMode"] == "HTTPMode"
        ended, failed = (None, None) if is_posted_here else self.submitter(job, status)
        if failed or (ended and time.time() > ended + SUBMITTER_S):
            status.update(jobDeploymentStatus="Failed", reason="AppFailed" if status.get("jobStatus") == "FAILED" else failed or
                          "JobDeploymentStatusTransitionGracePeriodExceeded")
            return
        code, reply = self.ask(job, status, "GET", f"/api/jobs/{status['jobId']}")
        if code == 404 and not is_posted_here:
            if ended:
                status.update(jobDeploymentStatus="Failed", reason="AppFailed", message="Submitter completed but Ray job not found in RayCluster.")
            return
        if code == 404:
            code, reply = self.ask(job, status, "POST", "/api/jobs/", {"entrypoint": job["spec"]["entrypoint"], "submission_id": status["jobId"]})
            if code == 200:
                self.posts.append(status["jobId"])
            return
        status.update(jobStatus=reply["status"], message=reply.get("message") or "")
        if reply["status"] in TERMINAL and (is_posted_here or ended):
            status["jobDeploymentStatus"] = "Failed" if reply["status"] == "FAILED" else "Complete"
            if reply["status"] == "FAILED":
                status["reason"] = "AppFailed"

    def submitter_job(self, job):
        code, found = self.plane.call("GET", self.plane.path("Job", self.namespace, job["metadata"]["name"]))
        return found if code == 200 else None

    def submitter(self, job, status):
        """(when it ended, why that is a failure of the RayJob); None where it is not so."""
        if job["spec"]["submissionMode"] == "K8sJobMode":
            conditions = {c["type"]: c for c in (self.submitter_job(job) or {}).get("status", {}).get("conditions", []) if c["status"] == "True"}
            done = conditions.get("Failed") or conditions.get("Complete")
            return done and seconds_of(done["lastTransitionTime"]), "SubmissionFailed" if "Failed" in conditions else None
        head = self.head_of(status)
        if head is None:
            return None, "AppFailed"
        state = next((c["state"].get("terminated") for c in head["status"].get("containerStatuses", []) if c["name"] == kuberay_pods.SUBMITTER), None)
        return state and seconds_of(state["finishedAt"]), "SubmissionFailed" if state and state["exitCode"] else None

    def release(self, job, status):
        """Suspending, Retrying: the RayCluster and the submitter's Job go at once, and nobody asks the job to stop."""
        there = [("RayCluster", self.cluster_of(status))]
        if job["spec"]["submissionMode"] == "K8sJobMode":
            there.append(("Job", self.submitter_job(job)))
        there = [(kind, found) for kind, found in there if found]
        for kind, found in there:
            if "deletionTimestamp" not in found["metadata"]:
                self.plane.call("DELETE", self.plane.path(kind, self.namespace, found["metadata"]["name"]), {"propagationPolicy": "Background"})
        if there:
            return
        for key in ("rayClusterName", "dashboardURL", "jobId", "message", "reason", "jobStatus"):
            status.pop(key, None)
        status["jobDeploymentStatus"] = {"Suspending": "Suspended", "Retrying": ""}[status["jobDeploymentStatus"]]

    def suspended(self, job, status):
        if not job["spec"].get("suspend"):
            status["jobDeploymentStatus"] = ""

    def ended(self, job, status):
        """The rules of deletion, or the time to live, which is the RayCluster's alone."""
        spec, age_s = job["spec"], time.time() - seconds_of(status["endTime"])
        rules = (spec.get("deletionStrategy") or {}).get("deletionRules", [])
        for rule in rules:
            when = rule["condition"]
            fits = when.get("jobStatus") == status.get("jobStatus", "-") or when.get("jobDeploymentStatus") == status["jobDeploymentStatus"]
            if fits and age_s >= when.get("ttlSeconds", 0):
                assert rule["policy"] == "DeleteSelf", rule
                self.plane.call("DELETE", self.plane.path("RayJob", self.namespace, job["metadata"]["name"]))
                return
        if not rules and spec.get("shutdownAfterJobFinishes") and age_s >= spec.get("ttlSecondsAfterFinished", 0):
            self.plane.call("DELETE", self.plane.path("RayCluster", self.namespace, status["rayClusterName"]))

    # ---- the RayCluster ----

    def cluster_of(self, status):
        name = status.get("rayClusterName")
        code, cluster = self.plane.call("GET", self.plane.path("RayCluster", self.namespace, name)) if name else (404, None)
        return cluster if code == 200 else None

    def create(self, doc, owner):
        doc["metadata"]["ownerReferences"] = [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
                                               "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}]
        code, reply = self.plane.create(doc, self.namespace)
        assert code == 201, (doc["kind"], reply.get("message"))
        return reply

    def make_cluster(self, job, status):
        name = status["rayClusterName"]
        spec = kuberay_pods.cluster_spec(job, name, status["jobId"])
        cluster = self.create({"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": spec}, job)
        selector = {k: v for k, v in kuberay_pods.labels(name, "headgroup", True).items() if k not in ("ray.io/group", "ray.io/is-ray-node")}
        ports = kuberay_pods.service_ports(spec["headGroupSpec"]["template"]["spec"])
        self.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{name}-head-svc"}, "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector,
            "ports": [{"name": k, "port": p} for k, p in ports.items()]}}, cluster)
        auth = spec.get("authOptions") or {}
        if auth.get("mode") == "token" and not auth.get("secretName"):
            token = base64.b64encode(secrets.token_hex(16).encode()).decode()
            self.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {"auth_token": token}}, cluster)
        return cluster

    def pods_of(self, cluster):
        pods = self.plane.ok("GET", self.plane.path("Pod", self.namespace) + f"?labelSelector=ray.io/cluster={cluster['metadata']['name']}")["items"]
        return [p for p in pods if "deletionTimestamp" not in p["metadata"]]

    def is_ready(self, pod):
        conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", [])}
        return pod["status"].get("phase") == "Running" and conditions.get("Ready") == "True"

    def keep_pods(self, job, cluster):
        """One head and the workers of each group, always: what has ended is deleted and made again, but no head that had the submitter in it."""
        spec, name = cluster["spec"], cluster["metadata"]["name"]
        there = []
        for pod in self.pods_of(cluster):
            if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
                self.plane.call("DELETE", self.plane.path("Pod", self.namespace, pod["metadata"]["name"]))
            else:
                there.append(pod["metadata"]["labels"]["ray.io/group"])
        for group in [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]:
            wanted, label = group.get("replicas", 1), group.get("groupName", "headgroup")
            if job["spec"]["submissionMode"] == "SidecarMode" and label == "headgroup" and job["status"]["jobDeploymentStatus"] != "Initializing":
                continue
            for _ in range(wanted - there.count(label)):
                pod = kuberay_pods.pod(spec, group, name, self.namespace)
                self.create(pod, cluster)

    # ---- the head ----

    def head_of(self, status):
        path = self.plane.path("Pod", self.namespace) + f"?labelSelector=ray.io/cluster={status['rayClusterName']},ray.io/node-type=head"
        return next((p for p in self.plane.ok("GET", path)["items"] if "deletionTimestamp" not in p["metadata"]), None)

    def ask(self, job, status, method, path, body=None):
        """(status, object) of a request to the dashboard, by the service's name, which the head's pod is behind."""
        cluster, head = status["rayClusterName"], self.head_of(status)
        if head is None or not head.get("status", {}).get("podIP"):
            raise ConnectionRefusedError("the head has no pod")
        headers = {"Content-Type": "application/json"}
        if (job["spec"]["rayClusterSpec"].get("authOptions") or {}).get("mode") == "token":
            secret = self.plane.ok("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{cluster}")
            headers["x-ray-authorization"] = f"Bearer {base64.b64decode(secret['data']['auth_token']).decode()}"
        connection = http.client.HTTPConnection(head["status"]["podIP"], int(status["dashboardURL"].rsplit(":", 1)[1]), timeout=REQUEST_S)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read()
            return reply.status, json.loads(text) if reply.status == 200 else {}

"""The pods that KubeRay makes of a RayJob, by the rules that its recorded pods follow (shared/data/kuberay-pods beside a
checkout; test_pods.py compares). Only what an operator adds: defaults are the API server's."""

import copy
import json
import re

import yaml

VERSION = "v1.7.0"
PORTS = {"client": 10001, "dashboard": 8265, "gcs-server": 6379, "metrics": 8080, "serve": 8000}
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def head_service(cluster, namespace):
    return f"{cluster}-head-svc.{namespace}.svc.cluster.local"


def amount(quantity):
    """In whole units, rounded up."""
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity)).groups()
    if unit == "m":
        return -(-int(number) // 1000)
    return -int(-float(number) * UNITS[unit] // 1)


def start_flags(group, is_head, cluster, namespace):
    """Of `ray start`: what the group says, and what nobody said; sorted by name."""
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    flags = {"block": "true", "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    if is_head:
        flags["dashboard-host"] = "0.0.0.0"
    else:
        flags["address"] = f"{head_service(cluster, namespace)}:6379"
    if "cpu" in limits:
        flags["num-cpus"] = str(amount(limits["cpu"]))
    if "memory" in limits:
        flags["memory"] = str(amount(limits["memory"]))
    gpus = [amount(v) for k, v in limits.items() if k.endswith("gpu")]
    if gpus and gpus[0]:
        flags["num-gpus"] = str(gpus[0])
    flags.update(group.get("rayStartParams") or {})
    line = "ray start --head " if is_head else "ray start "
    for name, value in sorted(flags.items()):
        if value == "true":
            line += f" --{name} "
        elif value != "false":
            line += f" --{name}={value} "
    return line


def field(name, path):
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def address_env(cluster, namespace):
    return [{"name": "FQ_RAY_IP", "value": head_service(cluster, namespace)}, {"name": "RAY_IP", "value": f"{cluster}-head-svc"}]


def token_env(spec, cluster):
    auth = spec.get("authOptions") or {}
    if auth.get("mode") != "token":
        return []
    return [{"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": auth.get("secretName") or cluster, "key": "auth_token"}}}]


def ray_env(line, is_head, cluster, namespace):
    return [
        *([] if is_head else address_env(cluster, namespace)),
        field("RAY_CLUSTER_NAME", "metadata.labels['ray.io/cluster']"), field("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
        field("RAY_CLOUD_INSTANCE_ID", "metadata.name"), field("RAY_NODE_TYPE_NAME", "metadata.labels['ray.io/group']"),
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": line}, {"name": "RAY_PORT", "value": "6379"},
        {"name": "RAY_ADDRESS", "value": "127.0.0.1:6379" if is_head else f"{head_service(cluster, namespace)}:6379"},
        {"name": "RAY_USAGE_STATS_KUBERAY_IN_USE", "value": "1"},
        *([{"name": "RAY_USAGE_STATS_EXTRA_TAGS", "value": f"kuberay_version={VERSION};kuberay_crd=RayJob"}] if is_head else []),
        {"name": "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "value": "1"}]


def wait_container(c, cluster, namespace):
    """In every worker, behind its own init containers: until the head's GCS answers."""
    check = f"ray health-check --address {head_service(cluster, namespace)}:6379"
    return {"name": "wait-gcs-ready", "image": c["image"], "imagePullPolicy": c.get("imagePullPolicy"), "command": ["/bin/bash", "-c", "--"],
            "args": [f"while ! {check}; do sleep 5; done"], "env": list(c.get("env", [])), "volumeMounts": list(c.get("volumeMounts", [])),
            "resources": {k: {"cpu": "200m", "memory": "256Mi"} for k in ("requests", "limits")}}


def labels(cluster, group, is_head):
    kind = "head" if is_head else "worker"
    return {"app.kubernetes.io/created-by": "kuberay-operator", "app.kubernetes.io/name": "kuberay", "ray.io/cluster": cluster,
            "ray.io/group": group, "ray.io/identifier": f"{cluster}-{kind}", "ray.io/is-ray-node": "yes", "ray.io/node-type": kind}


def pod(spec, group, cluster, namespace="default"):
    """Of one group of a RayCluster's spec; group is its headGroupSpec or one of workerGroupSpecs."""
    is_head = group is spec["headGroupSpec"]
    template = copy.deepcopy(group["template"])
    out, c = template["spec"], template["spec"]["containers"][0]
    line = start_flags(group, is_head, cluster, namespace)
    if "ray start" not in " ".join(c.get("command", []) + c.get("args", [])):
        own = " ".join(c.get("command", []) + c.get("args", []))
        c["command"] = ["/bin/bash", "-c", "--"]
        c["args"] = [(f"{own} && " if own else "") + "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}; " + line]
    if not is_head:
        out["initContainers"] = [*out.get("initContainers", []), wait_container(c, cluster, namespace)]
    for init in out.get("initContainers", []):
        init["env"] = [*init.get("env", []), *address_env(cluster, namespace)]
    c["env"] = [*c.get("env", []), *ray_env(line, is_head, cluster, namespace)]
    for container in [c, *(i for i in out.get("initContainers", []) if i["name"] == "wait-gcs-ready")]:
        container["env"] += token_env(spec, cluster)
    out["restartPolicy"] = "Never"
    if not any(p.get("name") == "metrics" for p in c.get("ports", [])):
        c["ports"] = [*c.get("ports", []), {"name": "metrics", "containerPort": 8080}]
    if not any(m["mountPath"] == "/dev/shm" for m in c.get("volumeMounts", [])):
        c["volumeMounts"] = [*c.get("volumeMounts", []), {"name": "shared-mem", "mountPath": "/dev/shm"}]
        out["volumes"] = [*out.get("volumes", []), {"name": "shared-mem", "emptyDir": {"medium": "Memory"}}]
    meta = template.get("metadata") or {}
    name = group.get("groupName", "headgroup")
    # A label of the template stays: the operator adds what is not there.
    meta["labels"] = {**labels(cluster, name, is_head), **(meta.get("labels") or {})}
    meta["generateName"] = (cluster if is_head else f"{cluster}-{name}")[:50] + ("-head-" if is_head else "-worker-")
    meta["namespace"] = namespace
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": out}


def service_ports(head):
    """Of the head's service: all that its first container names, or the usual ones if it names none."""
    named = {p["name"]: p["containerPort"] for p in head["containers"][0].get("ports", []) if p.get("name")}
    return {**named, "metrics": named.get("metrics", 8080)} if named else dict(PORTS)


def submit_line(rayjob, job_id, dashboard):
    """Of a submitter that brings no command, for bash; the entrypoint stands in it as it is. Only a pod of its own may be started again,
    so only that looks whether the job is there already."""
    spec, again = rayjob["spec"], rayjob["spec"]["submissionMode"] == "K8sJobMode"
    address = f"http://{dashboard}" if again else "http://127.0.0.1:8265"
    ask = f"import urllib.request; assert b'success' in urllib.request.urlopen('{address}/api/gcs_healthz', timeout=10).read()"
    submit = f"ray job submit --address {address}" + (" --no-wait" if again else "")
    if spec.get("runtimeEnvYAML"):
        submit += " --runtime-env-json " + json.dumps(json.dumps(yaml.safe_load(spec["runtimeEnvYAML"])))
    submit += f" --submission-id {job_id} -- {spec['entrypoint'].strip()} ;"
    if again:
        submit = f"if ! ray job status --address {address} {job_id} >/dev/null 2>&1 ; then {submit} fi ; " \
                 f"ray job logs --address {address} --follow {job_id}"
    return f'until python -c "{ask}" >/dev/null 2>&1 ; do echo "Waiting for {address}" ; sleep 2 ; done ; {submit}'


SUBMITTER = "ray-job-submitter"


def submitter_container(rayjob, cluster, job_id, dashboard):
    """Ours if the RayJob brings one, which SidecarMode does not take; else of the head's image."""
    spec, mode = rayjob["spec"]["rayClusterSpec"], rayjob["spec"]["submissionMode"]
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    template = rayjob["spec"].get("submitterPodTemplate") if mode == "K8sJobMode" else None
    c = copy.deepcopy(template["spec"]["containers"][0]) if template else {
        "name": SUBMITTER, "image": head["image"], "imagePullPolicy": head.get("imagePullPolicy"),
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "200Mi"}}}
    if not c.get("command"):
        c["command"], c["args"] = ["/bin/bash", "-ce", "--"], [submit_line(rayjob, job_id, dashboard)]
    c["env"] = [*c.get("env", []), {"name": "PYTHONUNBUFFERED", "value": "1"}, {"name": "RAY_DASHBOARD_ADDRESS", "value": dashboard},
                {"name": "RAY_JOB_SUBMISSION_ID", "value": job_id}, *token_env(spec, cluster)]
    return c


def submitter_job(rayjob, cluster, job_id, dashboard):
    """K8sJobMode: a batch Job with the RayJob's name."""
    head = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    template = copy.deepcopy(rayjob["spec"].get("submitterPodTemplate")) or {"spec": {
        "restartPolicy": "Never", "imagePullSecrets": head.get("imagePullSecrets", [])}}
    others = template["spec"].get("containers", [])[1:]
    template["spec"]["containers"] = [submitter_container(rayjob, cluster, job_id, dashboard), *others]
    limit = (rayjob["spec"].get("submitterConfig") or {}).get("backoffLimit", 2)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": rayjob["metadata"]["name"]},
            "spec": {"backoffLimit": limit, "template": template}}


def cluster_spec(rayjob, cluster, job_id):
    """Of the RayCluster: the RayJob's, in SidecarMode with one container more in the head's pod. Nobody knows a dashboard yet."""
    spec = copy.deepcopy(rayjob["spec"]["rayClusterSpec"])
    if rayjob["spec"].get("submissionMode") == "SidecarMode":
        head = spec["headGroupSpec"]["template"]["spec"]
        head["containers"].append(submitter_container(rayjob, cluster, job_id, ""))
        head["restartPolicy"] = "Never"
    return spec


def pods(rayjob, cluster, namespace="default"):
    """One of each group, the head first."""
    spec = cluster_spec(rayjob, cluster, "job-abcde")
    return [pod(spec, g, cluster, namespace) for g in [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]]

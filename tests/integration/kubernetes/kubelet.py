"""Pods of a real API server as real processes, as a kubelet runs them. For tests; inside namespaces.py alone.

A pod is a network namespace with an address of its own on a bridge and a hostname; a container is an overlay of this machine's `/` in a
mount and a PID namespace, so that its program is PID 1 and a write stays in it. Here are: the order of init containers,
environment (values, fields, secrets), $(NAME), volumes (emptyDir, secret, configMap, the account's token), probes, preStop,
SIGTERM, the grace period, SIGKILL, restartPolicy Never, names of services. Not here: images (all are this machine, with
mobula's build in front of the PATH), control groups, users, device plugins. Each pod is a node of its own, which may be lost.
"""

import base64
import contextlib
import http.client
import os
import pathlib
import shlex
import signal
import socket
import struct
import subprocess
import threading
import time

from control_plane import wait_for
from fake_api import stamp

BRIDGE = "pods0"
GATEWAY = "10.88.0.1"
LOOK_S = 0.2
PROBE_S = 0.5  # at most, for a test has no minutes

# $1 the directory of the container, $2 its working directory; the program follows. The environment is a file, for preStop needs it too.
ENTER = r"""set -e
at=$1 cwd=$2 build=$3 image=$4; shift 4
mount -t tmpfs container "$at/top"
mkdir "$at/top/upper" "$at/top/work" "$at/top/root"
root=$at/top/root
mount -t overlay container -o "lowerdir=/,upperdir=$at/top/upper,workdir=$at/top/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs run "$root/run"
mount --bind "$at/tmp" "$root/tmp"
mkdir -p "$root$build"
mount --bind "$build" "$root$build"
mkdir -p "$root/opt/mobula"
mount --bind "$image" "$root/opt/mobula"
mount --bind "$at/../hosts" "$root/etc/hosts"
mount --bind "$at/../resolv.conf" "$root/etc/resolv.conf"
while read -r from to; do
    mkdir -p "$root$to"
    mount --bind "$from" "$root$to"
done <"$at/mounts"
cp "$at/env" "$root/.env"
mkdir -p "$root$cwd"
cd "$root"
exec chroot "$root" /usr/bin/env -i /bin/sh -c 'set -a; . /.env; set +a; cd "$0"; exec "$@"' "$cwd" "$@"
"""


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True)


def expanded(text, env):
    """$(NAME) of a pod's command, arguments and values; $$ is one $."""
    out, rest = "", text
    while "$" in rest:
        before, rest = rest.split("$", 1)
        out += before
        if rest.startswith("$"):
            out, rest = out + "$", rest[1:]
        elif rest.startswith("(") and rest[1:].split(")", 1)[0] in env and ")" in rest:
            name, rest = rest[1:].split(")", 1)
            out += env[name]
        else:
            out += "$"
    return out + rest


class Container:
    def __init__(self, pod, spec):
        self.pod, self.spec, self.name = pod, spec, spec["name"]
        self.dir = pod.dir / self.name
        for name in ("top", "tmp"):  # what a container leaves in /tmp, its ranks' logs too, is for the test to read
            (self.dir / name).mkdir(parents=True)
        self.log_path = self.dir / "log"
        self.process = self.pid = self.code = self.began = self.ended = None
        self.pre_stop = None  # what it ended with
        self.is_ready = False

    # ---- what it is given ----

    def field(self, path):
        meta = self.pod.object["metadata"]
        for kind in ("labels", "annotations"):
            if path.startswith(f"metadata.{kind}['"):
                return meta.get(kind, {}).get(path.split("'")[1], "")
        return {"metadata.name": meta["name"], "metadata.namespace": meta["namespace"], "metadata.uid": meta["uid"],
                "status.podIP": self.pod.address, "spec.nodeName": self.pod.node}[path]

    def environment(self):
        plane = self.pod.kubelet.plane
        more = next((where for name, where in self.pod.kubelet.images.items() if self.spec["image"].startswith(name)), "")
        env = {"PATH": f"{more}/opt/mobula/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
               "HOSTNAME": self.pod.name, "KUBERNETES_SERVICE_HOST": plane.address, "KUBERNETES_SERVICE_PORT": str(plane.port)}
        for e in self.spec.get("env", []):
            where = e.get("valueFrom")
            if where is None:
                env[e["name"]] = expanded(e.get("value", ""), env)
            elif "fieldRef" in where:
                env[e["name"]] = self.field(where["fieldRef"]["fieldPath"])
            else:
                ref = where["secretKeyRef"]
                env[e["name"]] = self.pod.secret(ref["name"])[ref["key"]]
        return env

    # ---- its life ----

    def start(self):
        env = self.environment()
        (self.dir / "env").write_text("".join(f"{k}={shlex.quote(v)}\n" for k, v in env.items()))
        mounts = sorted(self.spec.get("volumeMounts", []), key=lambda m: m["mountPath"])
        # /var/run is a link of the machine's to /run.
        (self.dir / "mounts").write_text("".join(
            f"{self.pod.volume(m)} {os.path.realpath(m['mountPath'])}\n" for m in mounts))
        argv = [expanded(word, env) for word in self.spec.get("command", []) + self.spec.get("args", [])]
        net = f"/proc/{self.pod.pause.pid}/ns"
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net={net}/net", f"--uts={net}/uts", "unshare", "--mount", "--pid", "--fork", "--kill-child",
                 "--propagation", "private", "/bin/sh", "-c", ENTER, "enter", str(self.dir), self.spec.get("workingDir", "/"),
                 str(self.pod.kubelet.build), str(self.pod.kubelet.image), *argv],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.began = time.time()

    def main_pid(self):
        """Of PID 1, as this machine counts."""
        if self.pid is None:
            with contextlib.suppress(OSError):
                children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
                self.pid = int(children[0]) if children else None
        return self.pid

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def wait(self):
        code = self.process.wait()
        self.code, self.ended, self.is_ready = 128 - code if code < 0 else code, time.time(), False
        return self.code

    def signal(self, number):
        if self.is_running() and self.main_pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.main_pid(), number)

    def inside(self, argv, timeout_s):
        """A command in the container: its status, None if it took too long."""
        with open(self.dir / "exec.log", "ab") as log:
            p = subprocess.Popen(["nsenter", "--target", str(self.main_pid()), "--mount", "--uts", "--net", "--pid", "--root", "--wd=/",
                                  "/usr/bin/env", "-i", "/bin/sh", "-c", 'cd /; set -a; . /.env; set +a; exec "$@"', "sh", *argv],
                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            try:
                return p.wait(max(0.1, timeout_s))
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()

    # ---- probes ----

    def answers(self, probe):
        if "exec" in probe:
            return self.inside(probe["exec"]["command"], probe.get("timeoutSeconds", 1)) == 0
        get = probe["httpGet"]
        port = next((p["containerPort"] for p in self.spec.get("ports", []) if p.get("name") == get["port"]), get["port"])
        connection = http.client.HTTPConnection(self.pod.address, port, timeout=probe.get("timeoutSeconds", 1))
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", get.get("path", "/"))
            return 200 <= connection.getresponse().status < 400
        return False

    def probe(self):
        """Until it has ended: readiness, and SIGKILL where liveness has failed too often."""
        ready, alive, failed = self.spec.get("readinessProbe"), self.spec.get("livenessProbe"), {"ready": 0, "alive": 0}
        next_alive = self.began + (alive or {}).get("initialDelaySeconds", 0)
        while self.is_running() and not self.pod.is_lost:
            if ready is None:
                self.is_ready = True
            elif self.answers(ready):
                self.is_ready, failed["ready"] = True, 0
            else:
                failed["ready"] += 1
                self.is_ready = self.is_ready and failed["ready"] < ready.get("failureThreshold", 3)
            if alive and time.time() >= next_alive:
                next_alive = time.time() + alive.get("periodSeconds", 10)
                failed["alive"] = 0 if self.answers(alive) else failed["alive"] + 1
                if failed["alive"] >= alive.get("failureThreshold", 3):
                    self.signal(signal.SIGKILL)
            self.pod.gone.wait(min(PROBE_S, (ready or {}).get("periodSeconds", PROBE_S)))

    # ---- its end ----

    def terminate(self, deadline):
        """preStop, SIGTERM, and SIGKILL when the grace period is over: preStop's time counts in it."""
        if not self.is_running():
            return
        hook = self.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook:
            began = time.time()
            self.pre_stop = self.inside(hook["command"], deadline - began)
            self.pod.note(f"{self.name}: preStop ended with {self.pre_stop} after {time.time() - began:.1f} s")
        self.pod.note(f"{self.name}: SIGTERM")
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(max(0.1, deadline - time.time()))
        except subprocess.TimeoutExpired:
            self.pod.note(f"{self.name}: SIGKILL, the grace period is over")
            self.pod.was_killed = True
            self.signal(signal.SIGKILL)
            self.process.wait()

    def status(self):
        if self.is_running():
            state = {"running": {"startedAt": stamp(self.began)}}
        elif self.code is None:
            state = {"waiting": {"reason": "PodInitializing"}}
        else:
            state = {"terminated": {"exitCode": self.code, "reason": "Completed" if self.code == 0 else "Error",
                                    "startedAt": stamp(self.began), "finishedAt": stamp(self.ended)}}
        return {"name": self.name, "image": self.spec["image"], "imageID": "", "ready": self.is_ready, "restartCount": 0, "state": state}


class Pod:
    def __init__(self, kubelet, obj, number):
        meta = obj["metadata"]
        self.kubelet, self.object, self.name, self.namespace, self.uid = kubelet, obj, meta["name"], meta["namespace"], meta["uid"]
        self.dir = kubelet.dir / self.name
        self.dir.mkdir()
        self.node, self.address = f"node-{number}", f"10.88.{number // 200}.{number % 200 + 20}"
        self.phase, self.inits, self.containers = "Pending", [], []
        self.is_ending = self.is_lost = self.was_killed = False
        self.gone = threading.Event()
        self.sent = None
        self.began = time.time()
        (self.dir / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        (self.dir / "resolv.conf").write_text(
            f"nameserver {GATEWAY}\nsearch {self.namespace}.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n")
        self.pause = subprocess.Popen(["unshare", "--net", "--uts", "/bin/sh", "-c", 'hostname "$0"; exec sleep infinity', self.name],
                                      stdin=subprocess.DEVNULL)
        self.link = f"pod{number}"
        self.connect()
        self.thread = threading.Thread(target=self.live)
        self.thread.start()

    def note(self, text):
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", flush=True)

    def connect(self):
        comm = pathlib.Path(f"/proc/{self.pause.pid}/comm")
        wait_for(lambda: comm.read_text() == "sleep\n", "a namespace of the pod's own")
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pause.pid))
        run("ip", "link", "set", self.link, "master", BRIDGE, "up")
        for words in (["addr", "add", f"{self.address}/16", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"],
                      ["route", "add", "default", "via", GATEWAY]):
            run("nsenter", f"--net=/proc/{self.pause.pid}/ns/net", "ip", *words)

    def secret(self, name):
        data = self.kubelet.plane.ok("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{name}")["data"]
        return {k: base64.b64decode(v).decode() for k, v in data.items()}

    def volume(self, mount):
        """The directory behind a mount, made and filled when it is first asked for."""
        volume = next(v for v in self.object["spec"]["volumes"] if v["name"] == mount["name"])
        path = self.dir / f"volume-{mount['name']}"
        if not path.exists():
            path.mkdir()
            if "secret" in volume:
                files = self.secret(volume["secret"]["secretName"])
            elif "configMap" in volume:
                files = self.kubelet.plane.ok("GET", self.kubelet.plane.path("ConfigMap", self.namespace, volume["configMap"]["name"]))["data"]
            elif "projected" in volume:
                account = self.object["spec"]["serviceAccountName"]
                files = {"namespace": self.namespace, "token": self.kubelet.plane.token(self.namespace, account),
                         "ca.crt": (self.kubelet.plane.dir / "pki/ca.pem").read_text()}
            else:
                if volume["emptyDir"].get("medium") == "Memory":
                    run("mount", "-t", "tmpfs", "memory", path)
                    self.kubelet.memory.append(path)
                files = {}
            for name, text in files.items():
                (path / name).write_text(text)
        return path

    def live(self):
        spec = self.object["spec"]
        for c in spec.get("initContainers", []):
            init = Container(self, c)
            self.inits.append(init)
            if self.is_ending:
                return
            init.start()
            if init.wait() != 0:
                self.note(f"init container {init.name} ended with {init.code}")
                self.phase = "Failed"
                return
        self.containers = [Container(self, c) for c in spec["containers"]]
        if self.is_ending:
            return
        for c in self.containers:
            c.start()
        self.phase = "Running"
        probes = [threading.Thread(target=c.probe) for c in self.containers]
        for t in probes:
            t.start()
        waits = [threading.Thread(target=c.wait) for c in self.containers]  # each at its own time, for its status tells of it
        for t in waits:
            t.start()
        for t in waits:
            t.join()
        codes = [c.code for c in self.containers]
        self.note(f"ended with {codes}")
        for t in probes:
            t.join()
        self.phase = "Failed" if any(codes) else "Succeeded"

    def status(self):
        ready = bool(self.containers) and all(c.is_ready and c.is_running() for c in self.containers)
        say = {True: "True", False: "False"}
        return {"phase": self.phase, "podIP": self.address, "podIPs": [{"ip": self.address}], "startTime": stamp(self.began),
                "conditions": [{"type": "Initialized", "status": say[bool(self.containers)]}, {"type": "Ready", "status": say[ready]}],
                "containerStatuses": [c.status() for c in self.containers], "initContainerStatuses": [c.status() for c in self.inits]}

    def tell(self):
        status = self.status()
        if status != self.sent:
            path = self.kubelet.plane.path("Pod", self.namespace, self.name) + "/status"
            code, _ = self.kubelet.plane.call("PATCH", path, {"status": status}, kind="application/merge-patch+json")
            if code == 200:
                self.sent = status

    def end(self, grace_s):
        """Deleted at the API server; what it says then is the last of it."""
        self.note(f"to end within {grace_s} s")
        deadline = time.time() + grace_s
        running = [c for c in [*self.inits, *self.containers] if c.is_running()]
        ends = [threading.Thread(target=c.terminate, args=(deadline,)) for c in running]
        for t in ends:
            t.start()
        for t in ends:
            t.join()
        self.thread.join()
        self.kubelet.forget(self)

    def lose(self):
        """Its node, without a word: all processes and its network at once."""
        self.note("its node is lost")
        self.is_ending = self.is_lost = True
        run("ip", "link", "set", self.link, "down")
        for c in [*self.inits, *self.containers]:
            c.signal(signal.SIGKILL)
        self.thread.join()
        self.kubelet.forget(self)

    def log(self):
        """As `kubectl logs` has it."""
        return "".join(c.log_path.read_text(errors="replace") for c in [*self.inits, *self.containers] if c.log_path.exists())


class Names(threading.Thread):
    """The cluster's DNS: names of services, and that there is nothing else."""

    def __init__(self):
        super().__init__()
        self.known = {}  # name -> IPv4

    def start(self):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((GATEWAY, 53))
        super().start()

    def stop(self):
        self.socket.sendto(b"", (GATEWAY, 53))
        self.join()
        self.socket.close()

    def run(self):
        while True:
            query, peer = self.socket.recvfrom(4096)
            if not query:
                return
            self.socket.sendto(self.answer(query), peer)

    def answer(self, query):
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind, = struct.unpack_from(">H", query, at + 1)
        address = self.known.get(".".join(labels).lower())
        records = b"" if address is None or kind != 1 else b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
        flags = 0x8580 | (3 if address is None else 0)  # an authoritative answer; 3: no such name
        return query[:2] + struct.pack(">HHHHH", flags, 1, len(records) > 0, 0, 0) + query[12:at + 5] + records


class Kubelet:
    """Of all nodes. `pods` are those that there were, in order; their directories stay until the end."""

    def __init__(self, plane, directory, mobula, images=None):
        """images: what stands in front of the PATH in images whose names begin so, with a colon behind it."""
        self.images = images or {}
        self.plane, self.dir, self.build = plane, pathlib.Path(directory, "pods"), pathlib.Path(mobula).parents[1]
        self.dir.mkdir()
        self.image = pathlib.Path(directory, "image")
        (self.image / "bin").mkdir(parents=True)
        for name in ("mobula", "ray"):
            (self.image / "bin" / name).symlink_to(mobula)
        self.names = Names()
        self.pods, self.memory, self.stopping, self.fault = [], [], threading.Event(), None

    def __enter__(self):
        self.names.start()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join()
        self.names.stop()
        for pod in self.live_pods():
            pod.lose()
        for path in self.memory:
            run("umount", path)
        if self.fault:
            raise self.fault

    def live_pods(self):
        return [p for p in self.pods if not p.gone.is_set()]

    def loop(self):
        while not self.stopping.wait(LOOK_S):
            try:
                self.look()
            except Exception as fault:  # the test is told at its end
                self.fault = fault
                raise

    def look(self):
        known = {p.uid: p for p in self.pods}
        objects = self.plane.ok("GET", "/api/v1/pods")["items"]
        there = {obj["metadata"]["uid"] for obj in objects}
        for pod in self.live_pods():  # the API server waits for nobody where a pod has ended by itself
            if pod.uid not in there and not pod.is_ending:
                pod.is_ending = True
                threading.Thread(target=pod.end, args=(0,)).start()
        for obj in objects:
            meta = obj["metadata"]
            pod = known.get(meta["uid"])
            if pod is None and "deletionTimestamp" not in meta:
                pod = Pod(self, obj, len(self.pods) + 1)
                self.plane.ok("POST", self.plane.path("Pod", pod.namespace, pod.name) + "/binding", {
                    "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod.name}, "target": {"kind": "Node", "name": pod.node}})
                self.pods.append(pod)
            elif pod and "deletionTimestamp" in meta and not pod.is_ending:
                pod.is_ending = True
                threading.Thread(target=pod.end, args=(meta.get("deletionGracePeriodSeconds", 30),)).start()
        for pod in self.live_pods():
            if not pod.is_lost:
                pod.tell()
        self.name_services()

    def name_services(self):
        """Of every service the pod behind it, ready or not, as a headless one has it."""
        found = {}
        for service in self.plane.ok("GET", "/api/v1/services")["items"]:
            name, space, selector = service["metadata"]["name"], service["metadata"]["namespace"], service["spec"].get("selector")
            for pod in self.live_pods():
                if selector and not pod.is_ending and selector.items() <= pod.object["metadata"]["labels"].items():
                    found[f"{name}.{space}.svc.cluster.local"] = pod.address
        self.names.known = found

    def forget(self, pod):
        """The last of a pod: its network, and the object at the API server."""
        pod.gone.set()
        pod.pause.kill()
        pod.pause.wait()
        self.plane.call("DELETE", self.plane.path("Pod", pod.namespace, pod.name), {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}})


def make_network():
    """The bridge of all pods; the test's own servers listen at GATEWAY."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")

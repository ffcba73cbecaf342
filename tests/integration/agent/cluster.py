"""Agents below a real mobula-init, and a driver that speaks their protocols with plain grpcio."""

import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.request

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEADLINE_S = 120
# What ranks run that end when they are told to. Until a rank has said `up`, SIGTERM would kill its shell.
FOR_EVER = ["/bin/sh", "-c", "trap 'exit 0' TERM; echo up; sleep 1000 & wait"]


def load_protos(directory):
    """Our own .proto files as a pool of their own, so that Ray's may be loaded beside them."""
    out = pathlib.Path(directory) / "protos.bin"
    files = sorted(str(p.relative_to(ROOT)) for d in ("ray", "mobula")
                   for p in (ROOT / "proto" / d).glob("*.proto"))
    subprocess.run(["protoc", f"-I{ROOT}", "--include_imports", f"--descriptor_set_out={out}",
                    *files], cwd=ROOT, check=True)
    pool = descriptor_pool.DescriptorPool()
    for fd in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(fd)
    return pool


def wait_for(what, question, deadline_s=DEADLINE_S):
    """The first true answer; an event of another process, so it is asked for until the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        time.sleep(0.02)


class Sandbox:
    """A temporary directory, the protos, and every process started below it."""

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="mbagent-")
        self.pool = load_protos(self.dir)
        self.nodes = []
        return self

    def __exit__(self, kind, *_):
        for node in self.nodes:
            node.kill()
        if kind is None:
            wait_for("an empty sandbox", self.is_removed)
        else:
            print(f"left for inspection: {self.dir}", flush=True)
            for node in self.nodes:
                print(f"--- {node.log_path}\n{node.log()[-6000:]}", flush=True)

    def is_removed(self):
        """A supervisor writes its last words a moment after its agent has ended."""
        shutil.rmtree(self.dir, ignore_errors=True)
        return not os.path.exists(self.dir)

    def message(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def unary(self, channel, method, request, metadata=(), timeout=DEADLINE_S):
        service, name = method[1:].split("/")
        found = self.pool.FindServiceByName(service).FindMethodByName(name)
        reply = message_factory.GetMessageClass(found.output_type)
        call = channel.unary_unary(method, type(request).SerializeToString, reply.FromString)
        return call(request, timeout=timeout, metadata=metadata)

    def node(self, bin_dir, *flags, env=None, inside=()):
        """inside: words before the command, such as those that enter a network namespace."""
        node = Node(self, bin_dir, flags, env, inside)
        self.nodes.append(node)
        return node


class Node:
    """mobula-init with its agent."""

    def __init__(self, sandbox, bin_dir, flags, env, inside=()):
        self.sandbox = sandbox
        self.dir = tempfile.mkdtemp(prefix="n", dir=sandbox.dir)
        self.log_path = os.path.join(self.dir, "front.log")
        self.words = [*inside, f"{bin_dir}/mobula-init", "agent", "--run-dir", self.dir, "--",
                      f"{bin_dir}/mobula-agent", *flags, "--node-dir", self.dir, "--temp-dir",
                      sandbox.dir]
        self.env = {**os.environ, **(env or {})}
        self._start()

    def _start(self):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.words, stdout=log, stderr=log,
                                            stdin=subprocess.DEVNULL, env=self.env)

    def start_again(self):
        """What was killed as a whole, as its user would."""
        self._start()
        self.wait_alive(other_than_pid=self.info["pid_agent"])

    def log(self):
        return pathlib.Path(self.log_path).read_text(errors="replace")

    def file(self):
        try:
            return json.loads(pathlib.Path(self.dir, "node.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def wait_alive(self, other_than_pid=None):
        def alive():
            assert self.process.poll() is None, f"the node ended:\n{self.log()}"
            f = self.file()
            return f if f.get("state") == "ALIVE" and f["pid_agent"] != other_than_pid else None

        self.info = wait_for("ALIVE", alive)
        return self.info

    def http(self, path):
        url = f"http://{self.info['node_ip']}:{self.info['http_port']}{path}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
            return reply.read().decode()

    def state(self):
        return json.loads(self.http("/api/mobula/node"))

    def grpc_address(self):
        return f"{self.info['node_ip']}:{self.info['grpc_port']}"

    def kill_agent(self):
        """SIGKILL to the agent alone; the front process starts it anew."""
        pid = self.info["pid_agent"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self):
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def is_there(self, pid):
        try:
            return self.dir.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False

    def kill(self):
        """The front process is killed, which tells the agent to stop. One that still has checkpoints to send, to a
        server that may be gone, is not waited for. It may write its file until then."""
        if self.process.poll() is None:
            agent = self.file().get("pid_agent")
            self.process.kill()
            self.process.wait(DEADLINE_S)
            try:
                wait_for("its agent ends", lambda: not agent or not self.is_there(agent), 20)
            except AssertionError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)
                wait_for("its agent ends", lambda: not self.is_there(agent))

    def kill_at_once(self):
        """Both of its processes, as a machine without power: the head is told nothing."""
        pids = self.process.pid, self.file()["pid_agent"]
        for number in signal.SIGSTOP, signal.SIGKILL:
            for pid in pids:
                os.kill(pid, number)
        self.process.wait(DEADLINE_S)
        wait_for("its agent ends", lambda: not self.is_there(pids[1]))


def is_zombie(pid):
    """With all of its threads: the last one may still write."""
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1


@contextlib.contextmanager
def agent_is_down(node):
    """The agent is killed, and its front process starts it again when the block ends."""
    front = node.process.pid
    os.kill(front, signal.SIGSTOP)
    killed = node.kill_agent()
    try:
        wait_for("the agent's end", lambda: is_zombie(killed))
        yield killed
    finally:
        os.kill(front, signal.SIGCONT)


def taken(port):
    """Somebody has the port, as soon as the last thread of the killed agent let go of it."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past the connections it had

    def bound():
        with contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            s.listen()
            return True

    wait_for(f"port {port}", bound)
    return s


class Gcs:
    """What a driver asks of the head."""

    def __init__(self, sandbox, address, credentials=None, metadata=()):
        self.s, self.metadata = sandbox, list(metadata)
        options = [("grpc.enable_http_proxy", 0)]
        self.channel = grpc.secure_channel(address, credentials, options=options) \
            if credentials else grpc.insecure_channel(address, options=options)
        reply = self.call("NodeInfoGcsService/GetClusterId", "GetClusterIdRequest")
        self.metadata.append(("ray_cluster_id", reply.cluster_id.hex()))

    def call(self, method, request, **fields):
        return self.s.unary(self.channel, f"/ray.rpc.{method}",
                            self.s.message(f"ray.rpc.{request}")(**fields), self.metadata)

    def nodes(self):
        reply = self.call("NodeInfoGcsService/GetAllNodeInfo", "GetAllNodeInfoRequest")
        return {n.node_id.hex(): n for n in reply.node_info_list}

    def alive(self):
        return [h for h, n in self.nodes().items() if n.state == 0]

    def add_job(self):
        number = self.call("JobInfoGcsService/GetNextJobID", "GetNextJobIDRequest").job_id
        job_id = number.to_bytes(4, "little")
        data = self.s.message("ray.rpc.JobTableData")(job_id=job_id, entrypoint="test")
        data.driver_address.worker_id = os.urandom(28)
        alive = [n for n in self.nodes().values() if n.state == 0]  # it ends with its node
        data.driver_address.node_id = max(alive, key=lambda n: n.is_head_node).node_id
        data.driver_address.ip_address = "127.0.0.1"
        data.driver_address.port = 1
        self.call("JobInfoGcsService/AddJob", "AddJobRequest", data=data)
        return job_id

    def create_group(self, bundles, strategy=0):
        job_id = self.add_job()
        spec = self.s.message("ray.rpc.PlacementGroupSpec")(
            placement_group_id=os.urandom(14) + job_id, strategy=strategy, creator_job_id=job_id,
            creator_actor_id=b"\xff" * 12 + job_id, creator_actor_dead=True)
        for i, bundle in enumerate(bundles):
            b = spec.bundles.add()
            b.bundle_id.placement_group_id = spec.placement_group_id
            b.bundle_id.bundle_index = i
            for name, amount in bundle.items():
                b.unit_resources[name] = amount
        # max_cpu_fraction_per_node of Ray before 2.60: 1.0, as its own clients send it.
        spec.MergeFromString(b"\x51" + struct.pack("<d", 1.0))
        self.call("PlacementGroupInfoGcsService/CreatePlacementGroup",
                  "CreatePlacementGroupRequest", placement_group_spec=spec)
        return spec.placement_group_id

    def group(self, pg):
        return self.call("PlacementGroupInfoGcsService/GetPlacementGroup",
                         "GetPlacementGroupRequest",
                         placement_group_id=pg).placement_group_table_data

    def wait_created(self, pg):
        def created():
            group = self.group(pg)
            return group if group.state == 2 else None

        return wait_for("placement group CREATED", created)

    def remove_group(self, pg):
        self.call("PlacementGroupInfoGcsService/RemovePlacementGroup",
                  "RemovePlacementGroupRequest", placement_group_id=pg)


class Driver:
    """One Control stream to one agent."""

    def __init__(self, sandbox, address, pg, attempt=1, lease_ms=60000, job_id="job-1",
                 gang_id=b""):
        self.s = sandbox
        self.sent = queue.Queue()
        self.received = queue.Queue()
        self.logs = {}
        self.uploads = []
        self.passed = {"endpoint": [], "saved": []}  # while something else was awaited
        self.gate = threading.Event()  # cleared: nothing is read from the stream
        self.gate.set()
        self.channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self.call = self.channel.stream_stream(
            "/mobula.v1.NodeAgent/Control",
            sandbox.message("mobula.v1.DriverMessage").SerializeToString,
            sandbox.message("mobula.v1.AgentMessage").FromString)(iter(self.sent.get, None))
        threading.Thread(target=self.read, daemon=True).start()
        self.send(hello={"protocol_version": 1, "placement_group_id": pg, "attempt": attempt,
                         "job_id": job_id, "lease_ms": lease_ms, "gang_id": gang_id})

    def read(self):
        try:
            for message in self.call:
                self.received.put(message)
                self.gate.wait()
            self.received.put(None)
        except grpc.RpcError as e:
            self.received.put(e)

    def send(self, **body):
        self.sent.put(self.s.message("mobula.v1.DriverMessage")(**body))

    def expect(self, *kinds, deadline_s=DEADLINE_S):
        """The next message of these kinds; logs, uploads, endpoints and what was saved are kept, others of a gang
        passed."""
        for kind in kinds:
            if self.passed.get(kind):
                return self.passed[kind].pop(0)
        end = time.monotonic() + deadline_s
        while True:
            try:
                m = self.received.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kinds} within {deadline_s} s") from None
            if isinstance(m, grpc.RpcError):
                if "error" in kinds:
                    return m
                raise AssertionError(f"the stream broke while {kinds} was awaited: {m}")
            if m is None:
                raise AssertionError(f"the stream ended while {kinds} was awaited")
            kind = m.WhichOneof("body")
            if kind == "log":
                known = self.logs.setdefault(m.log.rank, b"")
                assert m.log.offset <= len(known), "a gap in the log"
                self.logs[m.log.rank] = known[:m.log.offset] + m.log.data
            if kind == "upload":
                self.uploads.append(m.upload)
            if kind in kinds:
                return getattr(m, kind)
            if kind in self.passed:
                self.passed[kind].append(getattr(m, kind))
            assert kind in ("log", "upload", "progress", "saved", "sealed", "endpoint", "note", "plan"), \
                f"{kind} came while {kinds} was awaited: {m}"

    def hears(self, text, *ranks):
        """Each of these ranks has written it."""
        for rank in ranks or (0,):
            while text not in self.logs.get(rank, b""):
                self.expect("log")

    def launch(self, argv, ranks=(0,), world_size=None, bundle=0, checkpoint=None, env=(),
               grace_ms=5000, num_nodes=1, node_rank=0):
        body = {"world_size": world_size or len(ranks), "num_nodes": num_nodes,
                "node_rank": node_rank, "argv": argv, "env": list(env), "stop_grace_ms": grace_ms,
                "ranks": [{"rank": r, "local_rank": i, "bundle_index": bundle}
                          for i, r in enumerate(ranks)]}
        if checkpoint:
            body["checkpoint"] = checkpoint
        self.send(launch=body)

    @contextlib.contextmanager
    def renewing(self):
        """While the test does something slow: a driver that is there."""
        over = threading.Event()

        def renew():
            while not over.wait(1):
                self.send(renew={})

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self):
        self.sent.put(None)
        self.call.cancel()
        self.channel.close()

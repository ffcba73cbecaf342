"""A mobula cluster of real processes, in a temporary directory, for as long as a `with` block lasts.

The first node is the head. Every process gets TMPDIR inside the cluster's directory, which all its
descendants inherit: so processes of this cluster are found by their environment, whatever their
session or parent is. Leaving the block stops the cluster with `mobula stop` and then insists that
nothing is left: no process, no listening port, no file in /dev/shm, no socket.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

MOBULA = pathlib.Path(os.environ["MOBULA_BIN"])
RAY = pathlib.Path(sys.executable).parent / "ray"
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")

# What this run of tests starts has it in its environment, servers beside the cluster too: so another
# run on the machine, which may have been given a port that was ours, is told from a leftover.
os.environ["MB_TEST_RUN"] = f"{os.getpid()}-{time.time_ns()}"


def wait_until(look, what, timeout_s=120.0):
    """The first true value of look(), asked again and again until the deadline, and once after it: who
    did not run for a while has not looked."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() > deadline
        value = look()
        if value:
            return value
        if is_last:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what() if callable(what) else what}")
        time.sleep(0.02)


def is_alive(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def tree(pid):
    """A process and all below it, of which some may end between any two looks."""
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        children = []
    return [pid, *(p for child in children for p in tree(int(child)))]


def kill_all(pids):
    """All at once, as the loss of power does: none sees another's end. One that has ended already is none."""
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


def kill_node(node):
    """As if the machine were gone: nothing of the node starts its agent again, or leaves in order."""
    kill_all([node["pid_init"], node["pid_agent"]])


def command_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "gone"


def environment_of(pid):
    """As text; "" of a process that is gone, which may be between any two looks at it."""
    try:
        return pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def shared_memory_names():
    """What may be a leak in /dev/shm: names that workers give their memory. Whatever else runs on
    the machine, a fuzzer of ours included, comes and goes there as it likes."""
    return {n for n in os.listdir("/dev/shm") if n.startswith("mobula-comm")}


def port_answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def listeners(port):
    """Processes that listen on this port."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    found = set()
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(link) in sockets:
                found.add(int(link.parts[2]))
    return found


def is_of_another_run(pid):
    try:
        names = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    mark = next((n for n in names if n.startswith(b"MB_TEST_RUN=")), None)
    return mark not in (None, b"MB_TEST_RUN=" + os.environ["MB_TEST_RUN"].encode())


def is_left_listening(port):
    """Somebody answers there, and is not known to be of another run of tests."""
    if not port_answers(port):
        return False
    pids = listeners(port)
    return any(not is_of_another_run(p) for p in pids) if pids else port_answers(port)


class Cluster:
    """`address` is the head's Jobs URL, `gcs` its host:port, `dir` a scratch directory."""

    START_TIMEOUT_S = 180
    STOP_TIMEOUT_S = 180

    def __init__(self, nodes=2, env=None, start_args=()):
        self._n_nodes = nodes
        self._start_args = list(start_args)
        self.dir = tempfile.mkdtemp(prefix="mb-e2e-", dir="/tmp")
        self.temp = f"{self.dir}/c"
        self.env = {k: v for k, v in os.environ.items()
                    if not k.startswith(("RAY_", "MOBULA_", "AWS_", "BUCKET_"))}
        self.env.update(TMPDIR=f"{self.dir}/tmp", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1",
                        RAY_USAGE_STATS_ENABLED="0", AWS_EC2_METADATA_DISABLED="true", **(env or {}))
        os.mkdir(self.env["TMPDIR"])
        self._shm_before = shared_memory_names()
        self._ports = set()
        self.address = self.gcs = None

    # ---- life ----

    def __enter__(self):
        try:
            self.start_head()
            for i in range(1, self._n_nodes):
                self.start_node(i)
        except BaseException:
            self._kill_own()
            shutil.rmtree(self.dir, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind, *_):
        try:
            try:
                done = self.mobula("stop", "--temp-dir", self.temp, timeout=self.STOP_TIMEOUT_S)
                stopped = done.returncode == 0
            except subprocess.TimeoutExpired:
                stopped = False
            if kind is not None:
                self.print_logs()
                return
            if not stopped:
                self.print_logs()
                raise AssertionError(f"mobula stop failed: {done.returncode} {done.stdout}")
            self.assert_clean()
        finally:
            self._kill_own()
            shutil.rmtree(self.dir, ignore_errors=True)

    def start_head(self):
        done = self.mobula("start", "--head", "--temp-dir", self.temp, "--port", "0",
                           "--dashboard-port", "0", "--dashboard-agent-listen-port", "0",
                           "--node-name", "node-0", *self._start_args,
                           timeout=self.START_TIMEOUT_S)
        assert done.returncode == 0, f"mobula start --head: {done.returncode}\n{done.stdout}"
        head = next(n for n in self.nodes() if n["is_head"])
        self.gcs = head["gcs_address"]
        self.address = f"http://127.0.0.1:{head['dashboard_port']}"
        self._ports.update([int(self.gcs.rsplit(":", 1)[1]), head["dashboard_port"]])
        self.env["RAY_ADDRESS"] = self.gcs
        return done

    def start_node(self, index):
        done = self.mobula("start", "--address", self.gcs, "--temp-dir", self.temp, "--node-name",
                           f"node-{index}", "--dashboard-agent-listen-port", "0",
                           *self._start_args, timeout=self.START_TIMEOUT_S)
        assert done.returncode == 0, f"mobula start --address: {done.returncode}\n{done.stdout}"
        return done

    def nodes(self):
        """The node files, each with its directory."""
        found = []
        for path in sorted(pathlib.Path(self.temp).glob("node_*/node.json")):
            node = json.loads(path.read_text())
            node["dir"] = path.parent
            found.append(node)
            for key in ("grpc_port", "http_port", "dashboard_port"):
                if node.get(key):
                    self._ports.add(int(node[key]))
        return found

    def node(self, name):
        return next(n for n in self.nodes() if n["node_name"] == name)

    def forget_node(self, node):
        """One that has ended: its directory goes, its ports may be anybody's now."""
        shutil.rmtree(node["dir"])
        self._ports -= {int(node[key]) for key in ("grpc_port", "http_port") if node.get(key)}

    # ---- what is left ----

    def own_pids(self):
        """Live processes that have our directory in their environment."""
        mark = self.dir.encode()
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes() and is_alive(entry.name):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def _kill_own(self):
        for pid in self.own_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_clean(self):
        def leftovers():
            return [f"{p} {command_of(p)}" for p in self.own_pids()]

        wait_until(lambda: not leftovers(), lambda: f"processes are left: {leftovers()}", 20)
        self.nodes()  # learns ports of nodes that a test started
        answering = [p for p in self._ports if is_left_listening(p)]
        assert not answering, f"ports still answer: {answering}"
        sockets = [str(p) for p in pathlib.Path(self.dir).rglob("*") if p.is_socket()]
        assert not sockets, f"sockets are left: {sockets}"
        leaked = shared_memory_names() - self._shm_before
        assert not leaked, f"left in /dev/shm: {leaked}"
        for log in pathlib.Path(self.temp).rglob("*.log"):  # of a build with sanitizers
            text = log.read_text(errors="replace")
            assert "Sanitizer" not in text and "runtime error:" not in text, f"{log}:\n{text[-8000:]}"
        scratch = os.listdir(self.env["TMPDIR"])
        assert not scratch, f"left in TMPDIR: {scratch}"

    def print_logs(self):
        """For a test that failed: the ends of the daemons' logs."""
        for path in sorted(pathlib.Path(self.temp).glob("node_*/*.log")) + sorted(
            pathlib.Path(self.temp).glob("node_*/gangs/*/rank-*.log")
        ):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            print(f"---- {path}", *lines, sep="\n", file=sys.stderr)

    # ---- commands ----

    def command(self, argv):
        """What `mobula ARGV` is run as."""
        return [str(MOBULA), *map(str, argv)]

    def mobula(self, *argv, env=None, timeout=180, **more):
        return self.run(*self.command(argv), env=env, timeout=timeout, **more)

    def ray(self, *argv, env=None, timeout=240):
        return self.run(RAY, *argv, env={"RAY_ADDRESS": None, **(env or {})}, timeout=timeout)

    def run(self, *argv, env=None, timeout=180, **more):
        """Output and errors together in stdout; env is added, None takes away."""
        full = {k: v for k, v in {**self.env, **(env or {})}.items() if v is not None}
        more.setdefault("stderr", subprocess.STDOUT)
        return subprocess.run([str(a) for a in argv], env=full, timeout=timeout, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, **more)

    @contextlib.contextmanager
    def running(self, *argv, env=None):
        """A mobula command in the background that never outlives us; .output() is text, .raw() bytes."""
        path = tempfile.mktemp(prefix="out-", dir=self.dir)
        full = {k: v for k, v in {**self.env, **(env or {})}.items() if v is not None}
        with open(path, "wb") as out:
            process = subprocess.Popen(self.command(argv), env=full, stdout=out,
                                       stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        process.output = lambda: pathlib.Path(path).read_text(errors="replace")
        process.raw = pathlib.Path(path).read_bytes
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    # ---- the Jobs API, without any client ----

    def call(self, method, path, body=None, raw=None):
        """(status, text) of a request to the head; body is sent as JSON, raw as it is."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path):
        status, text = self.call("GET", path)
        assert status == 200, f"GET {path}: {status} {text}"
        return json.loads(text)

    def submit(self, entrypoint, **fields):
        if not isinstance(entrypoint, str):
            entrypoint = shlex.join(map(str, entrypoint))
        status, text = self.call("POST", "/api/jobs/", {"entrypoint": entrypoint, **fields})
        assert status == 200, f"submit: {status} {text}"
        return json.loads(text)["submission_id"]

    def job(self, job_id):
        return self.get(f"/api/jobs/{job_id}")

    def logs(self, job_id):
        return self.get(f"/api/jobs/{job_id}/logs")["logs"]

    def wait_job(self, job_id, states=TERMINAL, timeout_s=180):
        def look():
            job = self.job(job_id)
            return job if job["status"] in states else None

        return wait_until(
            look,
            lambda: f"{job_id} is {self.job(job_id)}, expected {states}; its log:\n"
                    f"{self.logs(job_id)[-4000:]}",
            timeout_s,
        )

    def status(self):
        return self.get("/api/mobula/status")

    def is_up(self):
        """The head is there, with a node at least."""
        try:
            return any(n["state"] == "ALIVE" for n in self.status()["nodes"])
        except (OSError, http.client.HTTPException):
            return False

    def gang_of(self, job_id):
        """The gang record of a submission, None while there is none."""
        for job in self.status()["jobs"]:
            if job["submission_id"] == job_id:
                return job["gang"]
        return None

    def available(self, resource="mobula_slot"):
        return sum(n["resources_available"].get(resource, 0) for n in self.status()["nodes"]
                   if n["state"] == "ALIVE")

    def total(self, resource="mobula_slot"):
        return sum(n["resources_total"].get(resource, 0) for n in self.status()["nodes"]
                   if n["state"] == "ALIVE")

    def assert_all_free(self, timeout_s=60):
        """Every resource is back, and no process of a gang is left."""
        wait_until(lambda: self.available() == self.total(),
                   lambda: f"resources are not back: {self.status()['nodes']}", timeout_s)

    # ---- ranks ----

    def rank_pids(self, program=None):
        """rank -> pid of the processes that are ranks; program: only those whose command has it."""
        found = {}
        for pid in self.own_pids():
            try:
                env = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((v[5:] for v in env if v.startswith(b"RANK=")), None)
            if rank is not None and (program is None or program in command_of(pid)):
                found[int(rank)] = pid
        return found


class Joined(Cluster):
    """Nodes of a stock Ray head."""

    def __init__(self, gcs, nodes, env=None):
        super().__init__(nodes=nodes + 1, env=env, start_args=["--no-token"])
        self.gcs = gcs

    def start_head(self):
        self.env["RAY_ADDRESS"] = self.gcs


class NoCluster(Cluster):
    """Nothing is started; what a test starts must be gone at the end."""

    def start_head(self):
        pass

    def start_node(self, index):
        pass

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.assert_clean()
        finally:
            self._kill_own()
            shutil.rmtree(self.dir, ignore_errors=True)


def mini_model(iterations, *more):
    """Arguments of a tiny GPT on mock data that trains an iteration in milliseconds."""
    return [
        "--distributed-backend", "gloo", "--mock-data", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", "127", "--num-layers", "2", "--hidden-size", "32",
        "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32",
        "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3", "--min-lr", "1e-4",
        "--lr-decay-style", "cosine", "--lr-decay-iters", "20", "--lr-warmup-iters", "2",
        "--attention-dropout", "0", "--hidden-dropout", "0", "--log-interval", "1",
        "--eval-interval", "10", "--eval-iters", "2", "--train-iters", str(iterations), *more,
    ]  # fmt: skip


def train_command(url, iterations, *more):
    return ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", "--checkpoint-url", url,
            *mini_model(iterations, *more)]


ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*?consumed samples: +(\d+) \|.*?lm loss: (\S+) \|")


def iterations_of(log):
    """[(iteration, consumed samples, loss as printed)] of Megatron's log lines."""
    return [(int(i), int(n), loss) for i, n, loss in ITERATION.findall(log)]

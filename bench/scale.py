"""1, 100 and 1000 nodes (real agents, a process each, with its front process) at the embedded head and
at the real gcs_server of Ray 2.60: seconds until all are ALIVE, CPU and memory of both sides, calls and
stream messages a second between them (as the nodes count them), and how long after a SIGKILL of a tenth of them (at most 100) the
head has them DEAD.

Everything shares the machine, so the time until all are ALIVE is mostly that of starting processes;
the head's own part is `join_cpu_s`. `cpu_percent` is of one core over the quiet time after it."""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from kv import server
from lib import MOBULA, Mobula, Ray, children_of, cpu_s, memory, sh, write_result

COUNTS, QUIET_S, SETTLE_S, PATIENCE_S = (1, 100, 1000), 30.0, 10.0, 600
AT_ONCE = 50  # that start and are not ALIVE yet


class Memory(Mobula):
    """gcs_server keeps its tables in memory too."""

    def start_head(self):
        sh(MOBULA, "start", "--head", "--temp-dir", self.dir, "--port", self.gcs,
           "--dashboard-port", self.http, "--store", "memory")


class Agents:
    def __init__(self, gcs):
        self.gcs, self.dir = gcs, tempfile.mkdtemp(prefix="mb-scale-")
        self.fronts, self.waiting = {}, set()

    def _start(self, i):
        run = f"{self.dir}/{i}"
        os.mkdir(run)
        self.fronts[i] = subprocess.Popen(
            [MOBULA.parent / "mobula-init", "agent", "--run-dir", run, "--",
             MOBULA.parent / "mobula-agent", "--address", f"127.0.0.1:{self.gcs}", "--node-dir",
             run, "--temp-dir", self.dir, "--node-name", f"n{i}", "--dashboard-agent-listen-port",
             "0", "--num-gpus", "8"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        self.waiting.add(i)

    def node(self, i):
        try:
            return json.loads(pathlib.Path(self.dir, str(i), "node.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def grow(self, n):
        """Until n are ALIVE; seconds."""
        began = time.monotonic()
        end = began + PATIENCE_S
        while len(self.fronts) < n or self.waiting:
            while len(self.fronts) < n and len(self.waiting) < AT_ONCE:
                self._start(len(self.fronts))
            self.waiting -= {i for i in self.waiting if self.node(i).get("state") == "ALIVE"}
            assert time.monotonic() < end, f"{len(self.waiting)} of {n} are not ALIVE"
            time.sleep(0.02)
        return time.monotonic() - began

    def pids(self):
        return children_of([p.pid for p in self.fronts.values() if p.poll() is None])

    def kill(self, n):
        """The agents and their front processes, all at once; their node ids."""
        chosen = sorted(self.fronts)[-n:]
        ids = {self.node(i)["node_id"] for i in chosen}
        pids = children_of([self.fronts[i].pid for i in chosen])
        for sig in (signal.SIGSTOP, signal.SIGKILL):  # no front process starts its agent again
            for pid in pids:
                os.kill(pid, sig)
        for i in chosen:
            self.fronts.pop(i).wait()
        return ids

    def stop(self):
        pids = self.pids()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for p in self.fronts.values():
            p.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


class Table:
    """The head's table of nodes, asked as Ray's own clients do."""

    def __init__(self, port):
        import grpc
        from ray.core.generated import gcs_service_pb2 as pb
        self.request = pb.GetAllNodeInfoRequest
        self.call = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", 1 << 29)]
        ).unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
                      pb.GetAllNodeInfoRequest.SerializeToString,
                      pb.GetAllNodeInfoReply.FromString)

    def dead(self):
        return {n.node_id.hex() for n in self.call(self.request(), timeout=60).node_info_list
                if n.state == 1}


COUNTERS = re.compile(r"^mobula_grpc_(calls|requests|stream_messages)_total(?:\{.*\})? (\d+)$", re.M)


def traffic(agents):
    """{node: (seconds, calls in both directions, stream messages in both)}; of each node the first is its own clock."""
    seen = {}
    for i in agents.fronts:
        url = f"http://127.0.0.1:{agents.node(i)['http_port']}/metrics"
        text = urllib.request.urlopen(url, timeout=60).read().decode()
        counted = COUNTERS.findall(text)
        assert len(counted) == 5, text
        seen[i] = (time.monotonic(), sum(int(n) for what, n in counted if what != "stream_messages"),
                   sum(int(n) for what, n in counted if what == "stream_messages"))
    return seen


def rates(before, after):
    """Of all nodes, a second: calls, messages."""
    return [round(sum((after[i][k] - at[k]) / (after[i][0] - at[0]) for i, at in before.items()), 1)
            for k in (1, 2)]


def quiet(pid, agents):
    pids, sent = agents.pids(), traffic(agents)
    before, own = {p: cpu_s(p) for p in pids}, cpu_s(pid)
    began = time.monotonic()
    time.sleep(QUIET_S)
    took = time.monotonic() - began
    own = cpu_s(pid) - own
    theirs = sum(cpu_s(p) - at for p, at in before.items())
    n = len(agents.fronts)
    calls, messages = rates(sent, traffic(agents))
    return {"cpu_percent": round(100 * own / took, 3),
            "calls_per_s": calls, "stream_messages_per_s": messages,
            "node_cpu_percent": round(100 * theirs / took / n, 4)}


def detection(agents, table, n):
    """Seconds from the kill until the first and the last of n are DEAD."""
    killed = agents.kill(n)
    began = time.monotonic()
    first = None
    while True:
        dead = killed & table.dead()
        now = time.monotonic() - began
        if dead and first is None:
            first = now
        if dead == killed:
            return {"killed": n, "first_dead_s": round(first, 2), "all_dead_s": round(now, 2)}
        assert now < PATIENCE_S, f"{len(killed - dead)} of {n} are not DEAD"
        time.sleep(0.2)


def measure(make, counts):
    cluster = make()
    results = {}
    agents = None
    try:
        cluster.start_head()
        pid = server(cluster)
        time.sleep(SETTLE_S)
        results["0"] = {"memory": memory([pid])}
        agents = Agents(cluster.gcs)
        table = Table(cluster.gcs)
        for n in counts:
            before = cpu_s(pid)
            results[str(n)] = r = {"all_alive_s": round(agents.grow(n), 2),
                                   "join_cpu_s": round(cpu_s(pid) - before, 3)}
            time.sleep(SETTLE_S)
            r.update(quiet(pid, agents), memory=memory([pid]))
            some = children_of([agents.fronts[i].pid for i in range(min(n, 20))])
            r["node_uss_mib"] = round(memory(some)["uss_mib"] / min(n, 20), 2)
            print(make.__name__, n, json.dumps(r), file=sys.stderr, flush=True)
        if counts[-1] >= 10:
            results["detection"] = detection(agents, table, min(100, counts[-1] // 10))
    finally:
        if agents:
            agents.stop()
        cluster.stop()
    return results


def main():
    counts = tuple(int(w) for w in sys.argv[1:]) or COUNTS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    ours, ray = measure(Memory, counts), measure(Ray, counts)
    last = str(counts[-1])
    write_result("scale", {
        "mobula": ours, "ray 2.60.0 gcs_server": ray,
        "mobula_over_ray": {
            "cpu": round(ours[last]["cpu_percent"] / ray[last]["cpu_percent"], 3),
            "join_cpu": round(ours[last]["join_cpu_s"] / ray[last]["join_cpu_s"], 3),
            "rss": round(ours[last]["memory"]["rss_mib"] / ray[last]["memory"]["rss_mib"], 3)}})


if __name__ == "__main__":
    main()

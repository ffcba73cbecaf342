"""Shared by the benchmarks: starting and stopping both clusters, process trees, results."""
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/integration"))
from ports import free_port  # noqa: E402
CACHE = pathlib.Path(os.environ.get("MOBULA_CACHE", pathlib.Path.home() / ".cache/mobula"))
RAY_PYTHON = pathlib.Path(os.environ.get("MOBULA_RAY_PYTHON", CACHE / "venv-ray-2.60.0/bin/python"))
RAY = RAY_PYTHON.parent / "ray"
MOBULA = pathlib.Path(os.environ.get("MOBULA_BIN", ROOT / "build/release/bin")) / "mobula"


def sh(*argv, env=None, timeout=180, check=True):
    done = subprocess.run([str(a) for a in argv], env=env, timeout=timeout, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def children_of(pids):
    """The given processes and everything below them."""
    parent = {}
    for p in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            stat = (p / "stat").read_text()
        except OSError:
            continue
        parent[int(p.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    tree = set(pids)
    grown = True
    while grown:
        grown = False
        for pid, up in parent.items():
            if up in tree and pid not in tree:
                tree.add(pid)
                grown = True
    return {p for p in tree if p in parent}


def cpu_s(pid):
    """CPU seconds of a process so far, its ended threads included, from its scheduler clock: the
    ticks of /proc/PID/stat are 10 ms each, more than an idle node uses in a quarter of a minute."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives


def idle_cpu_percent(pids, seconds):
    """Of one core, over so many seconds; a process that ends meanwhile does not count."""
    before = {pid: cpu_s(pid) for pid in pids}
    began = time.monotonic()
    time.sleep(seconds)
    used = sum(cpu_s(pid) - at for pid, at in before.items() if os.path.exists(f"/proc/{pid}"))
    return round(100 * used / (time.monotonic() - began), 4)


def wait_quiet(percent=10, timeout_s=10):
    """Until the machine computes less than this for a third of a second: what the side before left may still be at work.
    Returns what it computed at last, in percent of all cores; after so long it is taken as it is."""
    def busy_and_all():
        fields = [int(f) for f in open("/proc/stat").readline().split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)
    end = time.monotonic() + timeout_s
    while True:
        busy, all_ = busy_and_all()
        time.sleep(0.33)
        busy_after, all_after = busy_and_all()
        seen = 100 * (busy_after - busy) / max(1, all_after - all_)
        if seen < percent or time.monotonic() > end:
            return round(seen, 1)


def memory(pids):
    """Sum over processes: RSS, PSS, USS in MiB, threads."""
    total = {"processes": len(pids), "rss_mib": 0.0, "pss_mib": 0.0, "uss_mib": 0.0, "threads": 0}
    for pid in pids:
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        kb = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
        total["rss_mib"] += kb["Rss"] / 1024
        total["pss_mib"] += kb["Pss"] / 1024
        total["uss_mib"] += (kb["Private_Clean"] + kb["Private_Dirty"]) / 1024
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total["threads"] += int(fields[17])
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in total.items()}


def get_json(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return json.load(reply)


def post_json(url, body, timeout=30):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST",
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def first_job(address):
    """A head's first job, which pays for its start-up; Ray's may not be able to run one yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            job_id = post_json(f"{address}/api/jobs/", {"entrypoint": "true"})["submission_id"]
            break
        except urllib.error.HTTPError as error:
            if error.code != 500 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    while (status := get_json(f"{address}/api/jobs/{job_id}")["status"]) in ("PENDING", "RUNNING"):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    assert status == "SUCCEEDED", status


class Mobula:
    """An embedded head, and as many further nodes as asked for, in a directory of their own."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="mb-bench-")
        self.gcs = free_port()
        self.http = free_port()
        self.address = f"http://127.0.0.1:{self.http}"

    def start_head(self):
        sh(MOBULA, "start", "--head", "--temp-dir", self.dir, "--port", self.gcs,
           "--dashboard-port", self.http)

    def start_node(self):
        before = set(self.node_pids())
        began = time.monotonic()
        sh(MOBULA, "start", "--address", f"127.0.0.1:{self.gcs}", "--temp-dir", self.dir)
        took = time.monotonic() - began
        return took, [p for p in self.node_pids() if p not in before]

    def node_pids(self):
        """Pids of the front processes, from the node files."""
        pids = []
        for f in pathlib.Path(self.dir).glob("node_*/node.json"):
            node = json.loads(f.read_text())
            if node.get("pid_init") and os.path.exists(f"/proc/{node['pid_init']}"):
                pids.append(int(node["pid_init"]))
        return pids

    def stop(self):
        sh(MOBULA, "stop", "--temp-dir", self.dir, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)


class Ray:
    """A real Ray head and worker nodes."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="rayb-", dir="/tmp")
        self.gcs = free_port()
        self.http = free_port()
        self.address = f"http://127.0.0.1:{self.http}"
        self.env = dict(os.environ, RAY_USAGE_STATS_ENABLED="0", RAY_ADDRESS="",
                        RAY_TMPDIR=self.dir)
        self.env.pop("RAY_ADDRESS")
        self.pids = set()

    def _ray_pids(self):
        found = set()
        for p in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                cmd = (p / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if self.dir in cmd or f":{self.gcs}" in cmd or f"={self.gcs}" in cmd:
                if int(p.name) != os.getpid():
                    found.add(int(p.name))
        return found

    def start_head(self):
        sh(RAY, "start", "--head", f"--port={self.gcs}", f"--dashboard-port={self.http}",
           "--num-cpus=1", "--object-store-memory=100000000", f"--temp-dir={self.dir}", env=self.env)
        self.pids = self._ray_pids()

    def start_node(self):
        before = self._ray_pids()
        began = time.monotonic()
        sh(RAY, "start", f"--address=127.0.0.1:{self.gcs}", "--num-cpus=1",
           "--object-store-memory=100000000", env=self.env)
        took = time.monotonic() - began
        new = children_of(self._ray_pids() - before)
        self.pids |= new
        return took, sorted(new)

    def stop(self):
        import signal
        pids = children_of(self._ray_pids() | {p for p in self.pids if os.path.exists(f"/proc/{p}")})
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, sig)
                except ProcessLookupError:
                    pass
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline and any(os.path.exists(f"/proc/{p}") for p in pids):
                time.sleep(0.05)
        shutil.rmtree(self.dir, ignore_errors=True)


class MobulaAtRay(Ray):
    """A real Ray head, joined by mobula's node."""

    def start_node(self):
        joined = Mobula()
        joined.gcs = self.gcs
        took, pids = joined.start_node()
        self.joined.append(joined)
        return took, pids

    def __init__(self):
        super().__init__()
        self.joined = []

    def stop(self):
        for joined in self.joined:
            joined.stop()
        super().stop()


def spread(values):
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4),
            "max": round(max(values), 4), "n": len(values)}


def iterations_ms(log, n, warm_up):
    """What n iterations took by a rank's log, without the first ones."""
    ms = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]
    if len(ms) != n:
        raise RuntimeError(f"{len(ms)} of {n} iterations in the log:\n{log}")
    return ms[warm_up:]


def write_result(name, data):
    commit = sh("git", "-C", ROOT, "rev-parse", "--short", "HEAD", check=False).strip()
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                if line.startswith("model name")), platform.machine())
    result = {"benchmark": name, "date": datetime.date.today().isoformat(), "commit": commit,
              "cpu": cpu, "cores": os.cpu_count(), "load": os.getloadavg()[0], **data}
    path = ROOT / "bench/results" / f"{result['date']}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return path

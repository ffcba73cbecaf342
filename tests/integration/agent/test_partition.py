"""The network between a real Ray head and our node is cut: test_partition.py BIN_DIR [SECONDS...]

Other lengths than those of ctest may stand there, a sweep say; between half a minute and a minute and
a half it is not asked whether Ray took the node for dead, only that the gang went on.

The node is in a network namespace, the driver of its gang there, too, or beside the head; between
both sides everything goes to an address that nobody has, as if a switch had died: nobody is told.
Needs root and ip; without them it is skipped (77).
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_job_agent import IS_MODERN, Head, Kv  # noqa: E402

BIN = sys.argv[1]
CUTS_S = [int(w) for w in sys.argv[2:]] or [5, 30, 120]
RAY_WAITS_S = 64  # until it takes a node that is silent for dead; sooner after former cuts
UNSURE_S = range(31, 90)  # whether it does
SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "0"}
NAME = "mb{}"  # of a namespace: the process that made it


def ip(*words):
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True).stdout


def sweep():
    """Namespaces that were left by a run that was killed."""
    for name in re.findall(rf"^{NAME.format('([0-9]+)')}\\b", ip("ip", "netns", "list"), re.M):
        if not pathlib.Path("/proc", name).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # somebody else was faster
                Link(int(name)).__exit__()


def free_net():
    """The first three numbers and a bit of a net of four addresses that this machine has not."""
    used = ip("ip", "-o", "-4", "addr")
    for i in range(os.getpid(), os.getpid() + (1 << 14)):
        net = f"10.77.{i // 64 % 256}."
        if f" {net}{i % 64 * 4 + 1}/" not in used:
            return net, i % 64 * 4
    raise OSError("no net is free")


class Link:
    """A namespace and the one link to it."""

    def __init__(self, pid=os.getpid()):
        self.name = NAME.format(pid)
        self.ends = (f"{self.name}a", f"{self.name}b")
        self.inside = ("ip", "netns", "exec", self.name)

    def __enter__(self):
        net, first = free_net()
        self.here, self.there = f"{net}{first + 1}", f"{net}{first + 2}"
        ip("ip", "netns", "add", self.name)
        try:
            ip("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1],
               "netns", self.name)
            ip("ip", "addr", "add", f"{self.here}/30", "dev", self.ends[0])
            ip("ip", "link", "set", self.ends[0], "up")
            ip(*self.inside, "ip", "addr", "add", f"{self.there}/30", "dev", self.ends[1])
            ip(*self.inside, "ip", "link", "set", self.ends[1], "up")
            ip(*self.inside, "ip", "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        subprocess.run(["ip", "link", "del", self.ends[0]], stderr=subprocess.DEVNULL)
        ip("ip", "netns", "del", self.name)

    def _neighbours(self, *words):
        """Of both ends: where frames for the other one go."""
        ip("ip", "neigh", words[0], self.there, *words[1:], "dev", self.ends[0])
        ip(*self.inside, "ip", "neigh", words[0], self.here, *words[1:], "dev", self.ends[1])

    def cut(self):
        self._neighbours("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def mend(self):
        self._neighbours("del")


def missing():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "root and ip are needed"
    try:
        sweep()
        with Link() as link:
            link.cut()
            link.mend()
    except (subprocess.CalledProcessError, OSError) as e:
        return f"no namespace with a link that can be cut: {e}"
    return None


def cut(s, head, link, node, seconds, side, address, command, ends_s):
    """What the driver of a gang says whose node is cut off for so long, and that ends by itself: the
    head sees the node again, as another one where it had taken it for dead."""
    before = node.file()["node_id"]
    job = subprocess.Popen(
        [*side, f"{BIN}/mobula", "run", "--address", f"{address}:{head.address.split(':')[1]}",
         "--num-nodes", "1", "--ranks-per-node", "2", "--", "sh", "-c", command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cluster.wait_for("ranks", lambda: any(g["ranks_running"] == 2 for g in gangs(link, node)))
    link.cut()
    end = time.monotonic() + seconds
    cluster.wait_for("the end of the cut", lambda: time.monotonic() > end, seconds + 10)
    link.mend()
    text = job.communicate(timeout=ends_s + 300)[0].decode()
    assert job.returncode == 0 and "attempt 2" not in text, \
        f"status {job.returncode}:\n{text[-2000:]}\n{node.log()[-3000:]}"
    gcs = cluster.Gcs(s, head.address)

    def is_free():  # under the id that it has by now
        return available(gcs, node.file().get("node_id")).get("mobula_slot") == 2.0

    cluster.wait_for("both slots are free", is_free)
    now = node.file()["node_id"]
    assert gcs.nodes()[now].state == 0
    assert seconds in UNSURE_S or (now == before) == (seconds < RAY_WAITS_S), (now, before)
    assert now == before or gcs.nodes()[before].state == 1, gcs.nodes()
    print(f"     cut for {seconds} s: {'the same node' if now == before else 'a new id'}", flush=True)
    return text


def lines(n):
    return f"i=0; while [ $i -lt {n} ]; do echo line $i; i=$((i+1)); sleep 1; done"


def case_cut(s, head, link, node, seconds):
    """The driver is with the node: a gang with a line a second goes on through it, in the longest a
    silent one, of which its driver hears nothing."""
    n = seconds + 8
    text = cut(s, head, link, node, seconds, link.inside, link.here,
               lines(n) if seconds < RAY_WAITS_S else f"sleep {n}; echo line {n - 1}", n)
    assert text.count(f"line {n - 1}\n") == 2, text


def case_cut_from_driver(s, head, link, node, seconds):
    """The driver is beside the head: it hears every line all the same, and none twice."""
    n = seconds + 30
    text = cut(s, head, link, node, seconds, (), "127.0.0.1", lines(n), n)
    assert all(text.count(f"line {i}\n") == 2 for i in range(n)), text
    assert "perhaps it is cut off" in text, text


def case_many_return(s):
    """A Ray that gives up soon has all nodes of a cut network for dead, and bears that they come back
    at the same moment: its GCS aborted when one had its sync stream open under the former id."""
    with RayHead(env=SOON) as head, Link() as link:
        nodes = [join(s, head, link, "--dashboard-agent-listen-port", "0") for _ in range(8)]
        gcs = cluster.Gcs(s, head.address)
        before = {n.info["node_id"] for n in nodes}
        link.cut()
        cluster.wait_for("all are dead", lambda: not before & set(gcs.alive()))
        since = time.monotonic()
        cluster.wait_for("connections end", lambda: time.monotonic() - since > 23, 60)
        link.mend()
        cluster.wait_for("all are back", lambda: before.isdisjoint(
            ids := {n.file().get("node_id") for n in nodes}) and ids < set(gcs.alive()))
        assert [n.stop() for n in nodes] == [0] * len(nodes)


def case_job_agent(s):
    """Jobs of the dashboard's, at a node that is cut off for long enough to be DEAD: one ends meanwhile,
    one goes on; both are right afterwards, with every line."""
    ends, goes_on = (pathlib.Path(s.dir, name) for name in ("ends", "goes-on"))
    with Head(env=SOON) as head, Link() as link:
        kv, gcs = Kv(s, head.address), cluster.Gcs(s, head.address)
        cluster.wait_for("Ray's own agent", lambda: kv.agent_port())
        node = join(s, head, link, "--job-agent")
        cluster.wait_for("the dashboard's key", lambda: kv.agent_port() == node.info["http_port"])
        for job, over in ("p-1", ends), ("p-2", goes_on):
            code, text = head.ray("submit", "--no-wait", "--submission-id", job, "--", "sh", "-c",
                                  f"i=0; until [ -e {over} ]; do echo line $i; i=$((i+1)); "
                                  "sleep 0.2; done; echo end")
            assert code == 0, text
            head.wait_state(job, "RUNNING")
        before = node.info["node_id"]
        link.cut()
        cluster.wait_for("it is dead", lambda: before not in gcs.alive())
        ends.touch()
        cluster.wait_for("the end", lambda: "job=p-1 RUNNING -> SUCCEEDED" in node.log())
        since = time.monotonic()
        cluster.wait_for("connections end", lambda: time.monotonic() - since > 23, 60)
        link.mend()
        cluster.wait_for("it is back", lambda: node.file().get("node_id") not in (None, before) and
                         node.file()["node_id"] in gcs.alive())
        assert head.wait_state("p-1", "SUCCEEDED") and head.state("p-2") == "RUNNING"
        cluster.wait_for("the new id", lambda: head.jobs()["p-2"]["driver_node_id"] ==
                         node.file()["node_id"])
        goes_on.touch()
        assert head.wait_state("p-2", "SUCCEEDED", "FAILED") == "SUCCEEDED", head.jobs()["p-2"]
        for job in "p-1", "p-2":
            code, text = head.ray("logs", job)
            said = [w for w in text.splitlines() if w.startswith(("line ", "end"))]
            assert code == 0 and len(said) > 1 and \
                said == [*(f"line {i}" for i in range(len(said) - 1)), "end"], text
        assert node.stop() == 0


def gangs(link, node):
    """Asked from where the node is: also while the link is cut."""
    done = subprocess.run(
        [*link.inside, sys.executable, "-c",
         "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())",
         f"http://{link.there}:{node.info['http_port']}/api/mobula/node"],
        stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["gangs"]


def available(gcs, node_id):
    reply = gcs.call("NodeResourceInfoGcsService/GetAllAvailableResources",
                     "GetAllAvailableResourcesRequest")
    return {e.node_id.hex(): dict(e.resources_available) for e in reply.resources_list}.get(
        node_id, {})


def join(s, head, link, *flags):
    node = s.node(BIN, "--address", f"{link.here}:{head.address.split(':')[1]}", "--no-token",
                  "--node-ip-address", link.there, *flags, inside=link.inside)
    node.wait_alive()
    return node


def main():
    if why := missing():
        print(f"SKIPPED: {why}")
        return 77
    for case in (case_many_return, case_job_agent) if IS_MODERN else (case_many_return,):
        with cluster.Sandbox() as s:
            case(s)
            print(f"ok   {case.__name__[5:]}", flush=True)
    with cluster.Sandbox() as s, RayHead() as head, Link() as link:
        node = join(s, head, link)
        for seconds in CUTS_S:
            case_cut(s, head, link, node, seconds)
            print(f"ok   cut_of_{seconds}_s", flush=True)
            if seconds > RAY_WAITS_S:  # Ray adds up what it missed in shorter ones
                case_cut_from_driver(s, head, link, node, seconds)
                print(f"ok   cut_of_{seconds}_s_from_driver", flush=True)
        assert node.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

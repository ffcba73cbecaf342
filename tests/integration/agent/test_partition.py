"""The network between a real Ray head and our node is cut: test_partition.py BIN_DIR [SECONDS...]

The node and the driver of its gang are in a network namespace; between it and the head everything
goes to an address that nobody has, as if a switch had died: nobody is told. Needs root and ip;
without them it is skipped (77).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402

BIN = sys.argv[1]
CUTS_S = [int(w) for w in sys.argv[2:]] or [5, 30, 120]
RAY_WAITS_S = 64  # until it takes a node that is silent for dead
HERE, THERE = "10.77.181.1", "10.77.181.2"


def ip(*words):
    subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


class Link:
    """A namespace and the one link to it."""

    def __init__(self):
        self.name = f"mb{os.getpid()}"
        self.ends = (f"{self.name}a", f"{self.name}b")
        self.inside = ("ip", "netns", "exec", self.name)

    def __enter__(self):
        ip("ip", "netns", "add", self.name)
        try:
            ip("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1],
               "netns", self.name)
            ip("ip", "addr", "add", f"{HERE}/30", "dev", self.ends[0])
            ip("ip", "link", "set", self.ends[0], "up")
            ip(*self.inside, "ip", "addr", "add", f"{THERE}/30", "dev", self.ends[1])
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
        ip("ip", "neigh", words[0], THERE, *words[1:], "dev", self.ends[0])
        ip(*self.inside, "ip", "neigh", words[0], HERE, *words[1:], "dev", self.ends[1])

    def cut(self):
        self._neighbours("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def mend(self):
        self._neighbours("del")


def missing():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "root and ip are needed"
    try:
        with Link() as link:
            link.cut()
            link.mend()
    except (subprocess.CalledProcessError, OSError) as e:
        return f"no namespace with a link that can be cut: {e}"
    return None


def case_cut(s, head, link, node, seconds):
    """A gang with a line a second goes on through it (in the longest a silent one, of which its
    driver hears nothing), and ends by itself; the head sees the node again, as another one where it
    had taken it for dead."""
    n_lines = seconds + 8
    count = f"i=0; while [ $i -lt {n_lines} ]; do echo line $i; i=$((i+1)); sleep 1; done"
    if seconds > RAY_WAITS_S:
        count = f"sleep {n_lines}; echo line {n_lines - 1}"
    before = node.file()["node_id"]
    job = subprocess.Popen(
        [*link.inside, f"{BIN}/mobula", "run", "--address", f"{HERE}:{head.address.split(':')[1]}",
         "--num-nodes", "1", "--ranks-per-node", "2", "--", "sh", "-c", count],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cluster.wait_for("ranks", lambda: any(g["ranks_running"] == 2 for g in gangs(link, node)))
    link.cut()
    end = time.monotonic() + seconds
    cluster.wait_for("the end of the cut", lambda: time.monotonic() > end, seconds + 10)
    link.mend()
    text = job.communicate(timeout=seconds + 60)[0].decode()
    assert job.returncode == 0 and text.count(f"line {n_lines - 1}\n") == 2, \
        f"status {job.returncode}:\n{text[-2000:]}\n{node.log()[-3000:]}"
    gcs = cluster.Gcs(s, head.address)
    now = node.file()["node_id"]
    cluster.wait_for("both slots are free", lambda: available(gcs, now).get("mobula_slot") == 2.0)
    assert gcs.nodes()[now].state == 0 and (now == before) == (seconds < RAY_WAITS_S)
    assert now == before or gcs.nodes()[before].state == 1, gcs.nodes()


def gangs(link, node):
    """Asked from where the node is: also while the link is cut."""
    done = subprocess.run(
        [*link.inside, sys.executable, "-c",
         "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())",
         f"http://{THERE}:{node.info['http_port']}/api/mobula/node"],
        stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["gangs"]


def available(gcs, node_id):
    reply = gcs.call("NodeResourceInfoGcsService/GetAllAvailableResources",
                     "GetAllAvailableResourcesRequest")
    return {e.node_id.hex(): dict(e.resources_available) for e in reply.resources_list}.get(
        node_id, {})


def main():
    if why := missing():
        print(f"SKIPPED: {why}")
        return 77
    with cluster.Sandbox() as s, RayHead() as head, Link() as link:
        node = s.node(BIN, "--address", f"{HERE}:{head.address.split(':')[1]}", "--no-token",
                      "--node-ip-address", THERE, inside=link.inside)
        node.wait_alive()
        for seconds in CUTS_S:
            case_cut(s, head, link, node, seconds)
            print(f"ok   cut_of_{seconds}_s", flush=True)
        assert node.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

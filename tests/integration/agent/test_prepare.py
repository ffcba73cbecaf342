"""An agent dies after PrepareBundleResources and before the commit: test_prepare.py BIN_DIR

At a real Ray head. The other node of the group is stopped meanwhile, so that the head has the word
of one and waits for that of the other.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402

BIN = sys.argv[1]
BUNDLE = {"mobula_gpu": 2, "mobula_slot": 1}  # all GPUs of a node
STRICT_SPREAD = 3


def joined(s, head):
    node = s.node(BIN, "--address", head.address, "--num-gpus", "2", "--no-token")
    node.wait_alive()
    return node


def free_gpus(node):
    return node.state()["resources_available"]["mobula_gpu"]


def states(node):
    return [b["state"] for b in node.state()["bundles"]]


@contextlib.contextmanager
def half_prepared(gcs, dies, waits):
    """The group has its bundle on the node that is to die, and the head has not heard of the other."""
    os.kill(waits.info["pid_agent"], signal.SIGSTOP)
    try:
        pg = gcs.create_group([BUNDLE, BUNDLE], STRICT_SPREAD)
        cluster.wait_for("the first half", lambda: states(dies) == ["PREPARED"])
        yield pg
    finally:
        os.kill(waits.info["pid_agent"], signal.SIGCONT)


def is_booked_once(gcs, nodes, group):
    """Whoever asks for the same GPUs gets them after the group is gone, and not before."""
    for node in nodes:
        bundles = node.state()["bundles"]
        assert [(b["state"], sorted(b["gpus"])) for b in bundles] == [("COMMITTED", [0, 1])], bundles
    assert sorted(b.node_id.hex() for b in gcs.wait_created(group).bundles) == \
        sorted(n.info["node_id"] for n in nodes)
    second = gcs.create_group([BUNDLE, BUNDLE], STRICT_SPREAD)
    cluster.wait_for("an attempt", lambda: gcs.group(second).stats.scheduling_attempt > 0)
    assert gcs.group(second).state == 0 and all(free_gpus(n) == 0 for n in nodes)
    gcs.remove_group(group)
    gcs.wait_created(second)
    gcs.remove_group(second)
    for node in nodes:
        cluster.wait_for("free GPUs", lambda: free_gpus(node) == 2 and not states(node))


def case_agent(s, head, gcs, one, two):
    """Its front process starts it again: what it had promised is void, and asked of it anew."""
    with half_prepared(gcs, one, two) as pg:
        down = contextlib.ExitStack()
        killed = down.enter_context(cluster.agent_is_down(one))
    with down:
        cluster.wait_for("the other half", lambda: states(two) and gcs.group(pg).state != 0)
    one.wait_alive(other_than_pid=killed)
    gcs.wait_created(pg)
    is_booked_once(gcs, (one, two), pg)


def case_node(s, head, gcs, one, two):
    """The whole node is gone; another takes its half. It comes back, and has what it had."""
    with half_prepared(gcs, one, two) as pg:
        one.kill()
    three = joined(s, head)
    gcs.wait_created(pg)
    assert states(three) == ["COMMITTED"]
    with open(one.log_path, "ab") as log:
        one.process = subprocess.Popen(one.process.args, stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL)
    one.wait_alive(other_than_pid=one.info["pid_agent"])
    assert free_gpus(one) == 2 and not states(one), one.state()
    third = gcs.create_group([BUNDLE])
    assert gcs.wait_created(third).bundles[0].node_id.hex() == one.info["node_id"]
    is_booked_once(gcs, (two, three), pg)  # while the third has the first node
    gcs.remove_group(third)
    cluster.wait_for("free GPUs", lambda: free_gpus(one) == 2)


def main():
    with cluster.Sandbox() as s, RayHead() as head:
        one, two = joined(s, head), joined(s, head)
        gcs = cluster.Gcs(s, head.address)
        for case in case_agent, case_node:
            case(s, head, gcs, one, two)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

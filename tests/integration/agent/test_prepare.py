"""All nodes of a gang or none, at a real Ray head: test_prepare.py BIN_DIR

An agent dies after PrepareBundleResources and before the commit; the other node of the group is
stopped meanwhile, so that the head has the word of one and waits for that of the other. Drivers that
wait then, and several that want the same nodes at once.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402

BIN = sys.argv[1]
BUNDLE = {"mobula_gpu": 2, "mobula_slot": 1}  # all GPUs of a node
STRICT_SPREAD = 3
REMOVED = 3  # a group


def joined(s, head):
    node = s.node(BIN, "--address", head.address, "--num-gpus", "2", "--no-token",
                  env={"LC_OUR_NODE": str(len(s.nodes))})  # inherited by ranks
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
    one.start_again()
    assert free_gpus(one) == 2 and not states(one), one.state()
    third = gcs.create_group([BUNDLE])
    assert gcs.wait_created(third).bundles[0].node_id.hex() == one.info["node_id"]
    is_booked_once(gcs, (two, three), pg)  # while the third has the first node
    gcs.remove_group(third)
    cluster.wait_for("free GPUs", lambda: free_gpus(one) == 2)
    assert three.stop() == 0


def driver(head, n_nodes, command, log):
    return subprocess.Popen(
        [f"{BIN}/mobula", "run", "--address", head.address, "--num-nodes", str(n_nodes),
         "--gpus-per-node", "2", "--wait-timeout", "5m", "--", "sh", "-c", command],
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def says(log):
    return pathlib.Path(log.name).read_text()


def ends_well(job, log):
    assert job.wait(cluster.DEADLINE_S) == 0, says(log)


def live_groups(gcs):
    rows = gcs.call("PlacementGroupInfoGcsService/GetAllPlacementGroup",
                    "GetAllPlacementGroupRequest").placement_group_table_data
    return [g for g in rows if g.state != REMOVED]


def case_driver_without_a_spare(s, head, gcs, one, two):
    """The node that is left is not held while the gang waits for another; the job goes on waiting,
    also when somebody removes its group."""
    with open(pathlib.Path(s.dir, "waits.log"), "wb") as log:
        n_committed = two.log().count("ledger: committed")
        os.kill(two.info["pid_agent"], signal.SIGSTOP)
        try:
            job = driver(head, 2, "echo rank $RANK", log)
            cluster.wait_for("the first half", lambda: states(one) == ["PREPARED"])
            one.kill_at_once()
        finally:
            os.kill(two.info["pid_agent"], signal.SIGCONT)
        cluster.wait_for("the other half", lambda: two.log().count("ledger: committed") > n_committed)
        cluster.wait_for("the node is free", lambda: free_gpus(two) == 2 and not states(two))
        assert "a node was lost before the gang had all of its nodes" in says(log), says(log)
        lone = gcs.create_group([BUNDLE])  # somebody else's
        assert gcs.wait_created(lone).bundles[0].node_id.hex() == two.info["node_id"]
        gcs.remove_group(lone)
        (group,) = cluster.wait_for("its own group", lambda: [g for g in live_groups(gcs) if len(g.bundles) == 2])
        since = time.monotonic()
        cluster.wait_for("it is old enough", lambda: time.monotonic() - since > 6)
        gcs.remove_group(group.placement_group_id)
        cluster.wait_for("another group", lambda: live_groups(gcs))
        three = joined(s, head)
        ends_well(job, log)
        assert "somebody removed the placement group" in says(log), says(log)
        assert all(f"rank {i}\n" in says(log) for i in range(4)), says(log)
    assert three.stop() == 0
    one.start_again()


def case_competition(s, head, gcs, one, two):
    """Gangs of one and of two nodes ask at once: each runs, no GPU is had by two ranks at a time."""
    locks = pathlib.Path(s.dir, "locks")
    locks.mkdir()
    command = (f"l={locks}/$LC_OUR_NODE.$CUDA_VISIBLE_DEVICES; mkdir $l || exit 9; sleep 0.3; rmdir $l;"
               " echo had ${l##*/}")
    logs = [open(pathlib.Path(s.dir, f"gang-{i}.log"), "wb") for i in range(7)]
    jobs = [driver(head, 1 + i % 2, command, log) for i, log in enumerate(logs)]
    for job, log in zip(jobs, logs):
        ends_well(job, log)
        log.close()
    had = [line.split()[-1] for log in logs for line in says(log).splitlines() if "] had " in line]
    assert set(had) == {"0.0", "0.1", "1.0", "1.1"} and len(had) == 2 * (4 * 1 + 3 * 2), had
    for node in one, two:
        cluster.wait_for("free GPUs", lambda: free_gpus(node) == 2 and not states(node))


def main():
    with cluster.Sandbox() as s, RayHead() as head:
        one, two = joined(s, head), joined(s, head)
        gcs = cluster.Gcs(s, head.address)
        for case in case_agent, case_node, case_driver_without_a_spare, case_competition:
            case(s, head, gcs, one, two)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

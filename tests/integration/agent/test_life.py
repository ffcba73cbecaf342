"""How soon a real Ray head knows that our node left, died or hangs: test_life.py BIN_DIR

Ray's settings for it are short here, so that what is measured is ours: it counts checks that failed.
"""

import os
import pathlib
import signal
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ports import free_port  # noqa: E402
from ray_head import RayHead  # noqa: E402

BIN = sys.argv[1]
PERIOD_S, TIMEOUT_S, CHECKS = 1, 1, 3
SOON = {"RAY_health_check_period_ms": str(PERIOD_S * 1000),
        "RAY_health_check_timeout_ms": str(TIMEOUT_S * 1000),
        "RAY_health_check_failure_threshold": str(CHECKS),
        "RAY_health_check_initial_delay_ms": "0"}
SLOW = 6  # times: a machine that does other work besides
LEAVES_S, LEAVES = 0.1, 10


def join(s, head, *flags):
    node = s.node(BIN, "--address", head.address, "--no-token", "--num-gpus", "2",
                  "--dashboard-agent-listen-port", "0", *flags)
    node.wait_alive()
    return node


def dead_after(gcs, node_id, since):
    row = cluster.wait_for("DEAD", lambda: gcs.nodes()[node_id]
                           if gcs.nodes()[node_id].state == 1 else None)
    return time.monotonic() - since, row.death_info


def case_leave(s, head, gcs):
    """SIGTERM: the head is told at once, with the right reason. The quickest of some leaves is what it takes where nothing else
    has the processor."""
    took, ended = [], []
    for _ in range(LEAVES):
        node = join(s, head)
        since = time.monotonic()
        node.process.terminate()
        while gcs.nodes()[node.info["node_id"]].state != 1:
            assert time.monotonic() - since < cluster.DEADLINE_S
        took.append(time.monotonic() - since)
        info = gcs.nodes()[node.info["node_id"]].death_info
        assert (info.reason, info.reason_message) == (1, "received SIGTERM"), info
        assert node.process.wait(cluster.DEADLINE_S) == 0
        ended.append(time.monotonic() - since)
    print(f"     DEAD {min(took):.3f} s after SIGTERM, median {statistics.median(took):.3f}; its processes ended after "
          f"{min(ended):.3f}, median {statistics.median(ended):.3f}, of {LEAVES}", flush=True)
    assert min(took) < LEAVES_S and statistics.median(took) < 10 * LEAVES_S, took


def case_killed(s, head, gcs):
    """SIGKILL to all of a node: nobody listens, which every check finds at once."""
    node = join(s, head)
    since = time.monotonic()
    node.kill_at_once()
    took, info = dead_after(gcs, node.info["node_id"], since)
    print(f"     DEAD {took:.1f} s after SIGKILL, by {CHECKS} checks each {PERIOD_S} s", flush=True)
    assert info.reason == 2 and took < SLOW * (CHECKS + 1) * PERIOD_S, (took, info)


def case_hangs(s, head, gcs):
    """SIGSTOP: connections stand, nothing is answered. Afterwards it is a node again, another one."""
    node = join(s, head)
    pid, former = node.info["pid_agent"], node.info["node_id"]
    since = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        took, info = dead_after(gcs, former, since)
    finally:
        os.kill(pid, signal.SIGCONT)
    bound = (CHECKS + 1) * (PERIOD_S + TIMEOUT_S)
    print(f"     DEAD {took:.1f} s after SIGSTOP, by {CHECKS} checks of {TIMEOUT_S} s", flush=True)
    assert info.reason == 2 and took < SLOW * bound, (took, info)
    cluster.wait_for("another id", lambda: node.file()["node_id"] != former and
                     node.file()["node_id"] in gcs.alive())
    assert node.file()["pid_agent"] == pid
    assert node.stop() == 0


def case_successor(s, head, gcs):
    """Another node listens where a dead one did: it answers for itself only."""
    port = str(free_port())
    first = join(s, head, "--node-manager-port", port)
    since = time.monotonic()
    first.kill_at_once()
    second = join(s, head, "--node-manager-port", port)
    assert second.info["grpc_port"] == first.info["grpc_port"] == int(port)
    took, info = dead_after(gcs, first.info["node_id"], since)
    print(f"     DEAD after {took:.1f} s, its port answers", flush=True)
    assert info.reason == 2 and took < SLOW * (CHECKS + 1) * PERIOD_S, (took, info)
    assert second.info["node_id"] in gcs.alive()
    pg = gcs.create_group([{"mobula_gpu": 2}])
    assert gcs.wait_created(pg).bundles[0].node_id.hex() == second.info["node_id"]
    gcs.remove_group(pg)
    assert second.stop() == 0


def main():
    with cluster.Sandbox() as s, RayHead(env=SOON) as head:
        gcs = cluster.Gcs(s, head.address)
        for case in case_leave, case_killed, case_hangs, case_successor:
            case(s, head, gcs)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

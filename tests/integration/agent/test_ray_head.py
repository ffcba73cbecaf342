"""An agent joined to a real Ray head: test_ray_head.py BIN_DIR"""

import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead, ray_version  # noqa: E402


def listed(gcs, node_id):
    return gcs.nodes()[node_id]


def case_alive(s, gcs, node):
    n = listed(gcs, node.info["node_id"])
    assert n.state == 0 and dict(n.resources_total) == {
        "mobula_gpu": 8.0, "mobula_slot": 8.0, "mobula_driver": 64.0}, n
    assert n.labels["ray.io/node-id"] == node.info["node_id"] and n.labels["pool"] == "a", n
    assert n.node_manager_port == node.info["grpc_port"]


def case_same_address(s, gcs, node):
    """As Ray's node here has: ray.init of an older Ray takes the first at its machine's address, which the log says."""
    own = listed(gcs, node.info["node_id"]).node_manager_address
    assert [n.is_head_node for n in gcs.nodes().values() if n.node_manager_address == own].count(True) == 1, own
    said = f" has the address {own} too: programs here that call ray.init may take this node for it and abort"
    if ray_version() < (2, 60):
        cluster.wait_for(said, lambda: said in node.log())
    else:
        assert said not in node.log()


def available(gcs, node):
    reply = gcs.call("NodeResourceInfoGcsService/GetAllAvailableResources",
                     "GetAllAvailableResourcesRequest")
    for entry in reply.resources_list:
        if entry.node_id.hex() == node.info["node_id"]:
            return dict(entry.resources_available)
    return {}


def case_group_and_gang(s, gcs, node):
    pg = gcs.create_group([{"mobula_gpu": 3, "mobula_slot": 3}])
    gcs.wait_created(pg)
    bundle = node.state()["bundles"][0]
    assert bundle["state"] == "COMMITTED" and bundle["gpus"] == [0, 1, 2], bundle
    cluster.wait_for("the head's view", lambda: available(gcs, node).get("mobula_gpu") == 5.0)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; echo $CUDA_VISIBLE_DEVICES; "
              "sleep 1000 & wait"], ranks=(0, 1, 2))
    d.expect("launched")
    d.hears(b"\n", 0, 1, 2)
    gcs.remove_group(pg)
    d.expect("failure")
    for _ in range(3):
        d.expect("rank_exit")
    d.expect("ended")
    assert [d.logs[r] for r in range(3)] == [b"0\n", b"1\n", b"2\n"], d.logs
    cluster.wait_for("the head's view", lambda: available(gcs, node).get("mobula_gpu") == 8.0)


def case_overbooking_is_refused(s, gcs, node):
    first = gcs.create_group([{"mobula_gpu": 8}])
    gcs.wait_created(first)
    second = gcs.create_group([{"mobula_gpu": 1}])
    cluster.wait_for("an attempt", lambda: gcs.group(second).stats.scheduling_attempt > 0)
    assert gcs.group(second).state == 0
    gcs.remove_group(first)
    gcs.wait_created(second)
    gcs.remove_group(second)


def case_ray_cli(s, gcs, node, address):
    """The head's autoscaler reports every 5 s, so the first answers may know nothing of us."""
    def knows_us():
        status = subprocess.run(
            [str(pathlib.Path(sys.executable).parent / "ray"), "status", "--address", address],
            capture_output=True, text=True, timeout=cluster.DEADLINE_S)
        return "/8.0 mobula_gpu" in status.stdout

    cluster.wait_for("mobula_gpu in `ray status`", knows_us)


def case_driver_that_waits(s, gcs, node, address):
    """Ray's head has a queue of its own: it takes the name with the priority, and does not know why a
    group waits; the driver then counts nodes, and leaves nothing behind."""
    done = subprocess.run(
        [str(pathlib.Path(sys.argv[1]) / "mobula"), "run", "--address", address, "--name", "waits",
         "--num-nodes", "2", "--priority", "5", "--wait-timeout", "8s", "--", "true"],
        capture_output=True, text=True, timeout=cluster.DEADLINE_S)
    assert done.returncode == 75, done
    said = "waiting for 2 nodes with 1 mobula_slot each: 1 such nodes are alive"
    assert f"mobula: {said}\n" in done.stderr, done.stderr
    assert f"no 2 nodes were free within 8 s: {said}; see: mobula status" in done.stderr, done.stderr
    reply = gcs.call("PlacementGroupInfoGcsService/GetAllPlacementGroup",
                     "GetAllPlacementGroupRequest")
    ours = [g for g in reply.placement_group_table_data if g.name == "mobula-waits@priority=5"]
    assert [g.state for g in ours] == [3], ours  # REMOVED


def case_restart(s, gcs, node):
    """The same node at its port; at another one, of which Ray's head cannot be told, a new node."""
    before = node.info
    killed = node.kill_agent()
    node.wait_alive(other_than_pid=killed)
    assert (node.info["node_id"], node.info["grpc_port"]) == \
        (before["node_id"], before["grpc_port"]), node.log()
    with cluster.agent_is_down(node) as killed:
        other = cluster.taken(before["grpc_port"])
    node.wait_alive(other_than_pid=killed)
    other.close()
    assert node.info["grpc_port"] != before["grpc_port"]
    assert listed(gcs, before["node_id"]).state == 1
    n = listed(gcs, node.info["node_id"])
    assert n.state == 0 and n.node_manager_port == node.info["grpc_port"], n


def case_stays_alive_and_leaves(s, gcs, node):
    """Longer than the head's first health check, which needs our answers; then an orderly end."""
    end = time.monotonic() + 8
    cluster.wait_for("8 s of life", lambda: time.monotonic() > end)
    assert listed(gcs, node.info["node_id"]).state == 0
    assert node.stop() == 0
    n = listed(gcs, node.info["node_id"])
    assert n.state == 1 and n.death_info.reason == 1, n
    assert n.death_info.reason_message == "received SIGTERM", n


def case_many_leave(s, gcs, bin_dir, address):
    """One after the other, as fast as they can: the head stands it."""
    for _ in range(40):
        node = s.node(bin_dir, "--address", address, "--no-token")
        node.wait_alive()
        assert node.stop() == 0
    assert len(gcs.alive()) == 1  # Ray's own


def case_unreachable_head(s, gcs, bin_dir):
    node = s.node(bin_dir, "--address", "no-such-host.invalid:1")
    assert node.process.wait(cluster.DEADLINE_S) == 66, node.log()
    assert "no-such-host.invalid" in node.file()["error"]


def main():
    with cluster.Sandbox() as s, RayHead() as head:
        node = s.node(sys.argv[1], "--address", head.address, "--num-gpus", "8", "--no-token",
                      "--labels", '{"pool": "a"}')
        node.wait_alive()
        gcs = cluster.Gcs(s, head.address)
        for case, *more in ((case_alive,), (case_same_address,), (case_group_and_gang,), (case_overbooking_is_refused,),
                            (case_ray_cli, head.address), (case_driver_that_waits, head.address),
                            (case_restart,), (case_stays_alive_and_leaves,)):
            case(s, gcs, node, *more)
            print(f"ok   {case.__name__[5:]}", flush=True)
        case_many_leave(s, gcs, sys.argv[1], head.address)
        print("ok   many_leave", flush=True)
        case_unreachable_head(s, gcs, sys.argv[1])
        print("ok   unreachable_head", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A node whose head is killed, or replaced by another cluster: test_membership.py BIN_DIR"""

import sys

import cluster


def case_head_killed(s, bin_dir, head, node, gcs):
    """The head comes back with what it knew; a gang elsewhere does not notice."""
    pg = gcs.create_group([{"mobula_gpu": 3}])
    group = gcs.wait_created(pg)
    assert group.bundles[0].node_id.hex() == node.info["node_id"], "only it has three"
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    d.expect("launched")
    killed = head.kill_agent()
    head.wait_alive(other_than_pid=killed)
    cluster.wait_for("both nodes", lambda: set(gcs.alive()) == {head.info["node_id"],
                                                               node.info["node_id"]})
    assert node.state()["gangs"][0]["state"] == "RUNNING"
    gcs.remove_group(pg)
    assert "group was removed" in d.expect("failure").text
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")


def case_another_cluster(s, bin_dir, head, node, gcs):
    """Bundles of the old cluster are void, the node registers under a new id."""
    pg = gcs.create_group([{"mobula_gpu": 3}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    d.expect("launched")
    port = head.info["gcs_address"].split(":")[1]
    old_id = node.info["node_id"]
    assert head.stop() == 0
    other = s.node(bin_dir, "--head", "--port", port, "--dashboard-port", "0", "--num-gpus", "1")
    other.wait_alive()
    assert "group was removed" in d.expect("failure").text
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")
    fresh = cluster.Gcs(s, other.info["gcs_address"])
    cluster.wait_for("both nodes", lambda: len(fresh.alive()) == 2)
    # The head lists the node a moment before the agent has its answer and writes node.json.
    cluster.wait_for("the new id in node.json", lambda: node.wait_alive()["node_id"] != old_id)
    assert node.info["node_id"] in fresh.alive()
    assert node.state()["bundles"] == []
    pg = fresh.create_group([{"mobula_gpu": 3}])
    fresh.wait_created(pg)
    return other


def main():
    with cluster.Sandbox() as s:
        head = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0", "--num-gpus",
                      "1")
        address = head.wait_alive()["gcs_address"]
        node = s.node(sys.argv[1], "--address", address, "--num-gpus", "3")
        node.wait_alive()
        gcs = cluster.Gcs(s, address)
        case_head_killed(s, sys.argv[1], head, node, gcs)
        print("ok   head_killed", flush=True)
        other = case_another_cluster(s, sys.argv[1], head, node, gcs)
        print("ok   another_cluster", flush=True)
        assert node.stop() == 0
        assert other.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

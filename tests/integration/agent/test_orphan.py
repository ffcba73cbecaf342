"""Placement groups whose driver is dead: test_orphan.py BIN_DIR

At our head one that died before its first Hello, at a real Ray head one that was killed and that no job
of Ray's ran. Nothing is left of either after a minute: no rank, no GPU, no group.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_prepare import BIN, driver, free_gpus, joined, live_groups, says, states  # noqa: E402

WITHIN_S = 90


def killed_driver(s, head):
    """What its nodes still hold then: the groups, and the pids of its ranks."""
    with open(pathlib.Path(s.dir, "killed.log"), "wb") as log:
        job = driver(head, 2, "echo here $$; sleep 1000", log)
        cluster.wait_for("four ranks", lambda: says(log).count("] here ") == 4)
        job.kill()
        job.wait()
    return [int(line.split()[-1]) for line in says(log).splitlines() if "] here " in line]


def main():
    with cluster.Sandbox() as s, RayHead() as ray:
        head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", "0")
        gcs = cluster.Gcs(s, head.wait_alive()["gcs_address"])
        nodes = joined(s, ray), joined(s, ray)
        rays = cluster.Gcs(s, ray.address)
        before = head.state()["resources_available"]["mobula_slot"]
        pg = gcs.create_group([{"mobula_slot": 1}])
        gcs.wait_created(pg)
        assert head.state()["resources_available"]["mobula_slot"] == before - 1
        ranks = killed_driver(s, ray)
        reply = gcs.call("NodeResourceInfoGcsService/GetAllTotalResources", "GetAllTotalResourcesRequest")
        rows = [name for entry in reply.resources_list for name in entry.resources_total]
        assert "mobula_slot" in rows and not [name for name in rows if "_group_" in name], rows
        assert live_groups(rays) and all(states(n) == ["COMMITTED"] for n in nodes)
        cluster.wait_for("the slot to be given back",
                         lambda: head.state()["resources_available"]["mobula_slot"] == before, WITHIN_S)
        print("ok   a group without a driver is given back", flush=True)
        for node in nodes:
            cluster.wait_for("free GPUs", lambda: free_gpus(node) == 2 and not states(node), WITHIN_S)
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks), ranks
        cluster.wait_for("no group", lambda: not live_groups(rays))
        print("ok   of a killed driver's gang nothing is left", flush=True)
        assert [n.stop() for n in (head, *nodes)] == [0] * 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

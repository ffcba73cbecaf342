"""Bundles that the head has no use for: test_release.py BIN_DIR

ReleaseUnusedBundles as a request, and as a real GCS makes it that comes back with its Redis: a group
was removed while its node could not be told. What is named stays; of the rest nothing is left, no
process and no GPU.
"""

import os
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import grpc  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_job_agent import Redis  # noqa: E402

BIN = sys.argv[1]
GPUS = 4


def group(gcs, n_gpus):
    pg = gcs.create_group([{"mobula_gpu": n_gpus, "mobula_slot": 1}])
    gcs.wait_created(pg)
    return pg


def gang(s, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(cluster.FOR_EVER)
    d.expect("launched")
    d.hears(b"up\n")
    return d


def ends_well(d):
    d.expect("failure")
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")


def held(node):
    return {b["placement_group_id"]: b["state"] for b in node.state()["bundles"]}


def is_free(node):
    state = node.state()
    return not state["bundles"] and state["resources_available"] == state["resources_total"]


def takes_all(gcs, node):
    """Nothing is left in Ray's books, either."""
    pg = group(gcs, GPUS)
    assert list(held(node)) == [pg.hex()], node.state()
    gcs.remove_group(pg)
    cluster.wait_for("free GPUs", lambda: is_free(node))


class Release:
    def __init__(self, s, node):
        self.s = s
        self.channel = grpc.insecure_channel(node.grpc_address(),
                                             options=[("grpc.enable_http_proxy", 0)])

    def __call__(self, *in_use):
        request = self.s.message("ray.rpc.ReleaseUnusedBundlesRequest")()
        for pg in in_use:
            bundle = request.bundles_in_use.add()
            bundle.bundle_id.placement_group_id = pg
        self.s.unary(self.channel, "/ray.rpc.NodeManagerService/ReleaseUnusedBundles", request)


def case_request(s):
    with RayHead() as head:
        gcs = cluster.Gcs(s, head.address)
        node = s.node(BIN, "--address", head.address, "--no-token", "--num-gpus", str(GPUS))
        node.wait_alive()
        release = Release(s, node)
        kept, gone, idle = group(gcs, 1), group(gcs, 2), group(gcs, 1)
        stays, ends = gang(s, node, kept), gang(s, node, gone)
        with stays.renewing():
            release(kept, gone, idle)
            assert set(held(node).values()) == {"COMMITTED"} and len(held(node)) == 3, held(node)
            release(kept, os.urandom(18))  # one that it never had
            ends_well(ends)
            cluster.wait_for("the bundles", lambda: held(node) == {kept.hex(): "COMMITTED"})
            assert node.state()["resources_available"]["mobula_gpu"] == GPUS - 1, node.state()
            release(kept)  # once more
            assert held(node) == {kept.hex(): "COMMITTED"}
            assert [g["state"] for g in node.state()["gangs"] if g["ranks_running"]] == ["RUNNING"]
            release()
            ends_well(stays)
        cluster.wait_for("free GPUs", lambda: is_free(node))
        release()
        assert is_free(node)
        assert "bundles=2" in node.log() and node.log().count("has no use for") == 2, node.log()
        for pg in kept, gone, idle:  # Ray, which knows nothing of that, gives back what is not there
            gcs.remove_group(pg)
        takes_all(gcs, node)
        for d in stays, ends:
            d.close()
        assert node.stop() == 0


def case_gcs_restart(s):
    """Its node hears of the removal only from the GCS of afterwards: the agent stood still, and was
    killed with what was sent to it."""
    with Redis() as redis, RayHead(env={"RAY_REDIS_ADDRESS": redis}, block=False) as head:
        gcs = cluster.Gcs(s, head.address)
        node = s.node(BIN, "--address", head.address, "--no-token", "--num-gpus", str(GPUS))
        node.wait_alive()
        kept, gone, idle = group(gcs, 1), group(gcs, 2), group(gcs, 1)
        stays, ends = gang(s, node, kept), gang(s, node, gone)
        agent = node.info["pid_agent"]
        with stays.renewing():
            os.kill(agent, signal.SIGSTOP)
            gcs.remove_group(gone)
            gcs.remove_group(idle)
            start_again = head.kill("gcs_server")
            os.kill(agent, signal.SIGKILL)
        cluster.wait_for("the agent's end", lambda: not node.is_there(agent))
        start_again()
        before = node.info["node_id"]
        node.wait_alive(other_than_pid=agent)
        assert node.info["node_id"] == before, node.log()
        cluster.wait_for("the release", lambda: "has no use for bundles=2" in node.log())
        again = cluster.Driver(s, node.grpc_address(), kept)
        again.expect("hello_reply")
        again.expect("launched")
        with again.renewing():
            cluster.wait_for("the bundles", lambda: held(node) == {kept.hex(): "COMMITTED"})
            assert node.state()["resources_available"]["mobula_gpu"] == GPUS - 1, node.state()
            assert [g["state"] for g in node.state()["gangs"] if g["ranks_running"]] == ["RUNNING"]
        gcs.remove_group(kept)
        ends_well(again)
        cluster.wait_for("free GPUs", lambda: is_free(node))
        takes_all(gcs, node)
        for d in stays, ends, again:
            d.close()
        assert node.stop() == 0


def main():
    for case in case_request, case_gcs_restart:
        with cluster.Sandbox() as s:
            case(s)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

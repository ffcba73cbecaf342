"""Checkpoints become durable, and come back: test_upload.py BIN_DIR

Two nodes below an embedded head, workers that speak report.h, a directory as the store.
"""

import functools
import json
import pathlib
import shutil
import sys
import time

import cluster
from worker import crc64nvme

HERE = pathlib.Path(__file__).resolve().parent
SLOW_DISK = pathlib.Path(sys.argv[1]).parent / "tests/integration/e2e/libslow_disk.so"
FLUSH_MS = 80  # of the slow disk: 400 files take it many seconds


def slow_disk(s):
    """While this file is there, flushes take their time."""
    return pathlib.Path(s.dir, "slow")


def node_with_a_slow_disk(s, *flags):
    node = s.node(sys.argv[1], *flags, env={"LD_PRELOAD": str(SLOW_DISK), "SLOW_DISK_WHILE": str(slow_disk(s)),
                                            "SLOW_DISK_MS": str(FLUSH_MS)})
    pid = node.wait_alive()["pid_agent"]
    assert SLOW_DISK.name in pathlib.Path(f"/proc/{pid}/maps").read_text(), "it is not loaded"
    return node


class Gang:
    """A group of two nodes, one rank each."""

    def __init__(self, s, gcs, nodes, attempt=1):
        self.pg = gcs.create_group([{"mobula_slot": 1}] * 2, strategy=3)
        group = gcs.wait_created(self.pg)
        by_id = {n.info["node_id"]: n for n in nodes}
        self.nodes = [by_id[b.node_id.hex()] for b in group.bundles]
        self.s = s
        self.gcs = gcs
        self.drivers = [None, None]

    def hello(self, i):
        self.drivers[i] = cluster.Driver(self.s, self.nodes[i].grpc_address(), self.pg)
        return self.drivers[i].expect("hello_reply")

    def launch_workers(self, iteration, n_files, env=(), **checkpoint):
        for i in (0, 1):
            self.hello(i)
            d = self.drivers[i]
            d.send(launch={
                "world_size": 2, "num_nodes": 2, "node_rank": i, "is_worker": True,
                "stop_grace_ms": 10000, "ranks": [{"rank": i, "bundle_index": i}],
                "env": env, "argv": [sys.executable, str(HERE / "worker.py"), checkpoint["local_dir"],
                         str(iteration), str(n_files)], "checkpoint": checkpoint})
        endpoints = []
        for d in self.drivers:
            launched = d.expect("launched")
            endpoints.append(d.expect("endpoint").endpoint)
        for d in self.drivers:
            d.send(start={"endpoints": endpoints})
        return launched

    def end(self, exit_code=0):
        for d in self.drivers:
            if exit_code is not None:
                e = d.expect("rank_exit")
                assert e.exit_code == exit_code, e
            d.send(end={})
            d.expect("ended")
            d.close()
        self.gcs.remove_group(self.pg)


checksum = functools.lru_cache(crc64nvme)


def check_store(store, iteration, n_files):
    assert (store / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    root = store / f"iter_{iteration:07d}"
    manifest = json.loads((root / ".mobula/manifest.json").read_text())
    assert len(manifest["files"]) == n_files, len(manifest["files"])
    for f in manifest["files"]:
        data = (root / manifest.get("data", "") / f["path"]).read_bytes()
        assert len(data) == f["size"] and f"{checksum(data):016x}" == f["crc64nvme"], f


def case_committed_by_two_nodes(s, gcs, nodes, store, local):
    gang = Gang(s, gcs, nodes)
    gang.launch_workers(10, 3, local_dir=str(local), url=f"file://{store}")
    gang.end()
    check_store(store, 10, 6)
    for d in gang.drivers:
        assert d.uploads[-1].committed and d.uploads[-1].iteration == 10, d.uploads
        assert d.logs[0 if d is gang.drivers[0] else 1].endswith(b"durable\n")


def case_same_name_again(s, gcs, nodes, store, local):
    """Another run of that name saves the iteration anew, beside what the pointer names until then."""
    before = [p for p in (store / "iter_0000010").rglob("rank?/*")]
    shutil.rmtree(local)
    gang = Gang(s, gcs, nodes)
    gang.launch_workers(10, 3, env=["SALT=another run "], local_dir=str(local),
                        url=f"file://{store}")
    gang.end()
    check_store(store, 10, 6)
    manifest = json.loads((store / "iter_0000010/.mobula/manifest.json").read_text())
    assert manifest["data"] == f".mobula/data-{gang.pg.hex()[:32]}-1", manifest
    assert len(before) == 6 and all(p.exists() for p in before), before


def case_agent_killed_while_uploading(s, gcs, nodes, store, local):
    gang = Gang(s, gcs, nodes)
    victim = gang.nodes[1]
    slow = slow_disk(s)
    slow.touch()
    gang.launch_workers(20, 400, local_dir=str(local), url=f"file://{store}")
    there = store / "iter_0000020" / "rank1"
    journal = pathlib.Path(victim.dir, "gangs", f"{gang.pg.hex()[:8]}-1", "upload.journal")

    def done():
        text = journal.read_bytes() if journal.exists() else b""
        return {p.name: p.stat().st_ino for p in there.glob("[0-9]*")
                if b'"r":"done","iteration":20,"path":"rank1/' + p.name.encode() in text}

    cluster.wait_for("some files", lambda: len(done()) > 10)
    with cluster.agent_is_down(victim) as killed:
        part = store / "iter_0000020/.mobula/part-1-of-2.json"
        assert not part.exists(), "the upload was over before the kill"
        done = done()
    slow.unlink()
    victim.wait_alive(other_than_pid=killed)
    assert gang.hello(1).running
    gang.drivers[1].expect("launched")
    gang.end()
    check_store(store, 20, 800)
    again = [name for name, inode in done.items() if (there / name).stat().st_ino != inode]
    assert len(done) > 10 and not again, f"{len(again)} of {len(done)} files were sent again"
    print(f"     {len(done)} files were done before the kill, none was sent again", flush=True)


def case_pulled(s, gcs, nodes, store, local):
    fresh = local.parent / "fresh"
    gang = Gang(s, gcs, nodes)
    launched = gang.launch_workers(30, 1, local_dir=str(fresh), url=f"file://{store}",
                                   load_url=f"file://{store}")
    assert launched.loaded_iteration == 20, launched
    gang.end()
    assert len(list((fresh / "iter_0000020").rglob("rank?/*"))) == 800
    assert (fresh / "latest_checkpointed_iteration.txt").read_text() == "20"
    check_store(store, 30, 2)


def case_damaged_newest_is_passed_over(s, gcs, nodes, store, local):
    bad = store / "iter_0000030/rank0/0000"
    data = bytearray(bad.read_bytes())
    data[7] ^= 1
    bad.write_bytes(data)
    fresh = local.parent / "fresh2"
    gang = Gang(s, gcs, nodes)
    launched = gang.launch_workers(0, 0, local_dir=str(fresh), load_url=f"file://{store}")
    assert launched.loaded_iteration == 20, launched
    for d in gang.drivers:
        d.send(stop={"reason": "enough"})
    for d in gang.drivers:
        d.expect("rank_exit")
        d.expect("ended")
    assert any("iteration 30 is not whole: rank0/0000" in n.log() for n in nodes)
    gcs.remove_group(gang.pg)


def case_a_part_that_never_comes(s, gcs, nodes, store, local):
    """A rank is gone before it saved: nobody waits for its part."""
    gang = Gang(s, gcs, nodes)
    gang.launch_workers(40, 1, env=["QUITS=1"], local_dir=str(local), url=f"file://{store}")
    d = gang.drivers[0]
    assert gang.drivers[1].expect("rank_exit").exit_code == 7
    assert d.expect("saved").iteration == 40
    cluster.wait_for("its part", (store / "iter_0000040/.mobula/part-0-of-2.json").exists)
    d.send(stop={"reason": "its peer is gone"})
    d.expect("rank_exit")
    for d in gang.drivers:
        d.send(end={"newest_on_all": -1})
    for d in gang.drivers:
        d.expect("ended", deadline_s=10)
        d.close()
    assert "ended before they saved" in gang.drivers[0].uploads[-1].error, gang.drivers[0].uploads
    assert (store / "latest_checkpointed_iteration.txt").read_text() == "30"
    gcs.remove_group(gang.pg)


def case_the_part_of_a_lost_node(s, gcs, nodes, store, local):
    """A node is gone before it sent its part: nobody waits for that, told early or late."""
    for iteration, first in ((50, []), (60, [1])):
        gang = Gang(s, gcs, nodes)
        gang.launch_workers(iteration, 1, env=["QUITS=1"], local_dir=str(local),
                            url=f"file://{store}")
        d = gang.drivers[0]
        assert gang.drivers[1].expect("rank_exit").exit_code == 7
        assert d.expect("saved").iteration == iteration
        part = store / f"iter_{iteration:07d}/.mobula/part-0-of-2.json"
        cluster.wait_for("its part", part.exists)
        d.send(stop={"reason": "a node is lost"})
        d.expect("rank_exit")
        began = time.monotonic()
        d.send(end={"lost_nodes": first})
        if not first:
            d.send(end={"lost_nodes": [1]})
        d.expect("ended", deadline_s=10)
        print(f"     ended {time.monotonic() - began:.2f} s later", flush=True)
        assert "node 1 was lost before it had sent its part" in d.uploads[-1].error, d.uploads
        assert d.uploads[-1].iteration == iteration
        gang.drivers[1].send(end={})
        gang.drivers[1].expect("ended", deadline_s=10)
        for d in gang.drivers:
            d.close()
        assert (store / "latest_checkpointed_iteration.txt").read_text() == "30"
        gcs.remove_group(gang.pg)


def case_the_part_that_a_lost_node_had_sent(s, gcs, nodes, store, local):
    """It was all that the lost node had to do: the iteration becomes durable."""
    gang = Gang(s, gcs, nodes)
    gang.launch_workers(70, 1, local_dir=str(local), url=f"file://{store}")
    for d in gang.drivers:
        assert d.expect("saved").iteration == 70
    for n in (0, 1):
        cluster.wait_for("the parts",
                         (store / f"iter_0000070/.mobula/part-{n}-of-2.json").exists)
    for d in gang.drivers:
        d.expect("rank_exit")
    gang.drivers[0].send(end={"lost_nodes": [1]})
    gang.drivers[0].expect("ended")
    assert gang.drivers[0].uploads[-1].committed, gang.drivers[0].uploads
    gang.drivers[1].send(end={"lost_nodes": [0]})
    gang.drivers[1].expect("ended")
    for d in gang.drivers:
        d.close()
    assert (store / "latest_checkpointed_iteration.txt").read_text() == "70"
    gcs.remove_group(gang.pg)


def case_tracker_of_a_foreign_trainer(s, gcs, nodes, store, local):
    store = local.parent / "store2"
    script = ("mkdir -p $D/iter_0000005/mp_rank_00 && echo x > $D/iter_0000005/mp_rank_00/m.pt && "
              "printf '' > $D/latest_checkpointed_iteration.txt && "
              "printf 5 > $D/latest_checkpointed_iteration.txt")
    pg = gcs.create_group([{"mobula_slot": 1}])
    group = gcs.wait_created(pg)
    node = next(n for n in nodes if n.info["node_id"] == group.bundles[0].node_id.hex())
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", script], env=[f"D={local.parent / 'foreign'}"],
             checkpoint={"local_dir": str(local.parent / "foreign"), "url": f"file://{store}",
                         "watch_tracker": True})
    d.expect("launched")
    assert d.expect("rank_exit").exit_code == 0
    d.send(end={})
    d.expect("ended")
    assert d.uploads[-1].committed, d.uploads
    check_store(store, 5, 1)
    gcs.remove_group(pg)


def main():
    with cluster.Sandbox() as s:
        head = node_with_a_slow_disk(s, "--head", "--port", "0", "--dashboard-port", "0")
        address = head.info["gcs_address"]
        other = node_with_a_slow_disk(s, "--address", address)
        gcs = cluster.Gcs(s, address)
        assert len(gcs.alive()) == 2
        store, local = pathlib.Path(s.dir, "store"), pathlib.Path(s.dir, "local")
        for case in (case_committed_by_two_nodes, case_same_name_again, case_agent_killed_while_uploading, case_pulled,
                     case_damaged_newest_is_passed_over, case_a_part_that_never_comes, case_the_part_of_a_lost_node,
                     case_the_part_that_a_lost_node_had_sent,
                     case_tracker_of_a_foreign_trainer):
            case(s, gcs, [head, other], store, local)
            print(f"ok   {case.__name__[5:]}", flush=True)
        assert other.stop() == 0
        assert head.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The wall clock of a node of a real Ray head jumps: test_clock.py BIN_DIR

By a day, back by two, and to the right time again: the node stays the one it was, the head hears of
what it holds, a gang runs through a jump.
"""

import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_ray_head import available  # noqa: E402

BIN = sys.argv[1]
SKEWED_CLOCK = pathlib.Path(BIN).parent / "tests/integration/s3/libskewed_clock.so"
DAY_S = 86400


def main():
    with cluster.Sandbox() as s, RayHead() as head:
        skew = pathlib.Path(s.dir, "skew")

        def jump(seconds):
            with open(skew, "r+b" if skew.exists() else "wb") as f:
                f.write(struct.pack("=q", seconds))

        jump(0)
        node = s.node(BIN, "--address", head.address, "--num-gpus", "8", "--no-token",
                      env={"LD_PRELOAD": str(SKEWED_CLOCK), "SKEW_FILE": str(skew)})
        node_id = node.wait_alive()["node_id"]
        maps = pathlib.Path(f"/proc/{node.info['pid_agent']}/maps").read_text()
        assert SKEWED_CLOCK.name in maps, "the clock that jumps is not loaded"
        gcs = cluster.Gcs(s, head.address)
        for seconds in (DAY_S, -DAY_S, 0):
            pg = gcs.create_group([{"mobula_gpu": 3}])
            gcs.wait_created(pg)
            d = cluster.Driver(s, node.grpc_address(), pg)
            d.expect("hello_reply")
            d.launch(["/bin/sh", "-c", "echo up; trap 'exit 0' TERM; sleep 1000 & wait"])
            d.expect("launched")
            cluster.wait_for("the bundle in the head's view",
                             lambda: available(gcs, node).get("mobula_gpu") == 5.0)
            jump(seconds)
            gcs.remove_group(pg)
            d.expect("failure")
            d.expect("rank_exit")
            d.expect("ended")
            d.close()
            cluster.wait_for("the head's view after a jump",
                             lambda: available(gcs, node).get("mobula_gpu") == 8.0)
            assert gcs.nodes()[node_id].state == 0 and node.file()["node_id"] == node_id
            print(f"ok   jump_to_{seconds}_s", flush=True)
        assert "dead" not in node.log(), node.log()
        assert node.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

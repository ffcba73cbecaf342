"""A head of a Ray before 2.40 is refused, in one line: test_old_head.py BIN_DIR

Run by the Python of such a Ray.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from commands import call, check, clean_env  # noqa: E402
from ray_head import RayHead, ray_version  # noqa: E402

BIN = sys.argv[1]


def main():
    assert ray_version() < (2, 40), ray_version()
    with cluster.Sandbox() as s, RayHead() as head:
        node = s.node(BIN, "--address", head.address, "--no-token")
        assert node.process.wait(cluster.DEADLINE_S) == 78, node.log()
        said = f"the head at {head.address} is Ray 2."
        assert said in node.file()["error"] and "use a head of Ray 2.40" in node.file()["error"], \
            node.file()
        assert len(cluster.Gcs(s, head.address).nodes()) == 1  # Ray's own
        print("ok   node", flush=True)
        check("driver", call(clean_env(), f"{BIN}/mobula", "run", "--address", head.address, "--",
                             "true"), 78, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Our client against a real Ray head; test_real_gcs.py GCS_CLIENT_MAIN"""

import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ray_head import RayHead  # noqa: E402


def main():
    with RayHead() as head:
        print(f"real head at {head.address}", flush=True)
        status = subprocess.run([sys.argv[1], head.address], timeout=240).returncode
        # Nothing that was sent may have ended the GCS.
        from ray._raylet import GcsClient
        nodes = GcsClient(address=head.address).get_all_node_info()
        states = sorted(str(info["state"]) for info in nodes.values()) if isinstance(
            next(iter(nodes.values())), dict) else len(nodes)
        print(f"ok   the GCS still answers: {states}")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""base/grpc against the GCS of a real Ray head: test_ray_gcs.py RAY_GCS_CLIENT

The C program does the calls and judges the replies; what it stored must then be visible to Ray's
own client.
"""

import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ray_head import RayHead  # noqa: E402


def main():
    from ray._raylet import GcsClient

    with RayHead() as head:
        print(f"real head at {head.address}", flush=True)
        status = subprocess.run([sys.argv[1], head.address], timeout=240).returncode
        value = GcsClient(address=head.address).internal_kv_get(b"from_c", b"mobula", timeout=20)
    expected = bytes((i * 31 >> 3) & 255 for i in range(1 << 20))
    if value != expected:
        print("FAIL Ray's own client reads another value")
        return 1
    print("ok   Ray's own client reads the value")
    return status


if __name__ == "__main__":
    sys.exit(main())

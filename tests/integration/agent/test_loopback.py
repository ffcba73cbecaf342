"""Ray's own tools at a head that listens on loopback only: test_loopback.py BIN_DIR

They put the machine's address in the place of 127.0.0.1, where such a head does not listen. The two
ways around it that docs/operations.md gives are these.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from commands import RAY, call, check, clean_env  # noqa: E402

BIN = sys.argv[1]


def main():
    with cluster.Sandbox() as s:
        head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", "0", "--num-gpus", "2")
        node_id = head.wait_alive()["node_id"]
        gcs = head.info["gcs_address"]
        assert gcs.startswith("127.0.0.1:"), gcs
        named = clean_env(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
        for name, env, address in (("0.0.0.0", clean_env(), "0.0.0.0:" + gcs.split(":")[1]),
                                   ("127.0.0.1 kept", named, gcs)):
            check(f"{name}: ray status", call(env, RAY, "status", "--address", address), 0,
                  "/2.0 mobula_gpu")
            check(f"{name}: ray list nodes", call(env, RAY, "list", "nodes", "--address", address),
                  0, node_id, "ALIVE")
            check(f"{name}: ray health-check", call(env, RAY, "health-check", "--address", address),
                  0)
        http = f"http://127.0.0.1:{head.info['dashboard_port']}"
        check("http: ray list nodes", call(clean_env(), RAY, "list", "nodes", "--address", http), 0,
              node_id, "ALIVE")
        check("http: ray job list", call(clean_env(), RAY, "job", "list", "--address", http), 0)
        assert head.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A network between the nodes of a training gang is cut: test_partition_training.py BIN_DIR [SECONDS...]

One node is in a network namespace, the other beside a real Ray head and the driver. Ranks of both wait
for each other in collectives meanwhile: one attempt goes through all cuts, and no iteration is done
twice or left out. Needs what test_partition.py needs.
"""

import contextlib
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray_head import RayHead  # noqa: E402
from test_partition import BIN, CUTS_S, Link, join, missing  # noqa: E402

EVERY = 50  # iterations a line
# Ranks that see each other's processes would share memory.
PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MODEL = [
    "--distributed-backend", "gloo", "--mock-data", "--tokenizer-type", "NullTokenizer",
    "--vocab-size", "127", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
    "--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2",
    "--global-batch-size", "8", "--lr", "1e-3", "--train-iters", str(10**5), "--eval-iters", "0",
    "--log-interval", str(EVERY)]  # fmt: skip


class Training:
    """A gang over both nodes; what its driver says goes to a file."""

    def __init__(self, s, head):
        self.path = pathlib.Path(s.dir, "training.log")
        with open(self.path, "wb") as log:
            self.driver = subprocess.Popen(
                [f"{BIN}/mobula", "train", "--address", head.address, "--num-nodes", "2",
                 "--gpus-per-node", "1", *MODEL], stdout=log, stderr=log)

    def text(self):
        return self.path.read_text()

    def iterations(self):
        return [int(i) for i in re.findall(r"iteration +(\d+)/", self.text())]

    def goes_on(self, n=4):
        """That many lines more; until then the driver is there."""
        before = len(self.iterations())

        def more():
            assert self.driver.poll() is None, self.text()[-3000:]
            return len(self.iterations()) >= before + n

        cluster.wait_for("iterations", more, 400)

    def stop(self):
        self.driver.terminate()
        self.driver.wait(cluster.DEADLINE_S)


def main():
    if why := missing():
        print(f"SKIPPED: {why}")
        return 77
    with cluster.Sandbox() as s, RayHead() as head, Link() as link:
        link.inside += PIDS
        join(s, head, link, "--num-gpus", "1")
        near = s.node(BIN, "--address", head.address, "--no-token", "--num-gpus", "1",
                      "--node-ip-address", link.here, "--dashboard-agent-listen-port", "0")
        near.wait_alive()
        training = Training(s, head)
        with contextlib.ExitStack() as stack:
            stack.callback(training.stop)
            training.goes_on()
            for seconds in CUTS_S:
                link.cut()
                since = time.monotonic()
                cluster.wait_for("the end of the cut", lambda: time.monotonic() - since > seconds,
                                 seconds + 10)
                stood = len(training.iterations())
                link.mend()
                since = time.monotonic()
                training.goes_on()
                print(f"ok   training, cut for {seconds} s: goes on {time.monotonic() - since:.0f} s "
                      f"after it, from line {stood}", flush=True)
        done = training.iterations()
        assert done == [EVERY * (i + 1) for i in range(len(done))], done
        assert "by shared memory" not in training.text(), training.text()[-3000:]
        assert "attempt 2" not in training.text(), training.text()[-3000:]
    return 0


if __name__ == "__main__":
    sys.exit(main())

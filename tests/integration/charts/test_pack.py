"""tools/pack: its tree trains in a root where nothing else is but /proc."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[3]
MODEL = ("--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 1 --hidden-size 32 "
         "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 "
         "--lr 1e-3 --train-iters 3 --save /saved --save-interval 3").split()


class Pack(unittest.TestCase):
    def test_alone_in_a_root(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-pack-")))
        tree = folder / "mobula"
        done = subprocess.run([ROOT / "tools/pack", tree], capture_output=True, text=True, timeout=1000)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        root = folder / "root"
        for name in ("tmp", "saved", "proc"):
            (root / name).mkdir(parents=True)
        inside = root / tree.relative_to("/")
        inside.parent.mkdir(parents=True)
        shutil.move(tree, inside)

        def run(program, *args, **env):
            done = subprocess.run(["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc=/proc", f"--root={root}",
                                   f"{tree}/bin/{program}", *args], env=env, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        self.assertEqual(run("ray", "--version"), run("mobula", "version"))
        for program in ("mobula-agent", "mobula-worker"):
            run(program, "--help")
        run("mobula-worker", *MODEL, RANK="0", WORLD_SIZE="1")
        self.assertEqual((root / "saved/latest_checkpointed_iteration.txt").read_text().strip(), "3")


if __name__ == "__main__":
    unittest.main()

"""`srun mobula train|run`: the step becomes head, nodes and gang, and leaves nothing behind.

A real slurmctld with two slurmd on this machine (slurm.py).
"""

import os
import pathlib
import re
import signal
import unittest

import slurm
from cluster import MOBULA, command_of, is_alive, train_command, wait_until


def pids_with_environment(text):
    """Processes, of any session, whose environment has the text."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass
    return [p for p in found if p != os.getpid() and is_alive(p)]


class SlurmTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.slurm = cls.enterClassContext(slurm.Slurm())

    def tearDown(self):
        wait_until(self.slurm.idle, "jobs are left")
        self.assert_nothing_left()

    def assert_nothing_left(self):
        own = {d.pid for d in self.slurm.daemons}

        def strays():
            return [p for p in pids_with_environment(f"HOME={self.slurm.dir}")
                    if p not in own and "mobula" in command_of(p)]

        wait_until(lambda: not strays(), lambda: [command_of(p) for p in strays()])
        shared = pathlib.Path(self.slurm.dir) / ".mobula/slurm"
        self.assertEqual(list(shared.glob("*")), [], "the file with the token")

    def node_dirs(self):
        return sorted(p.name for p in pathlib.Path(self.slurm.dir).glob("mobula-*"))

    def node_logs(self):
        return [p.read_text()[-2000:]
                for p in pathlib.Path(self.slurm.dir).glob("mobula-*/node_*/agent.log")]

    def srun(self, *argv, nodes=2, tasks=1):
        return self.slurm.run("srun", f"-N{nodes}", f"--ntasks-per-node={tasks}", *map(str, argv))

    def wait_for_line(self, srun, end):
        """A rank says it; what else the driver says before it is as it may be."""
        said = []
        while not re.fullmatch(rf"(\[rank \d\] )?{end}\n", line := srun.stdout.readline()):
            said.append(line)
            self.assertTrue(line, "srun ended: " + "".join(said))

    def test_run_on_two_nodes(self):
        before = self.node_dirs()
        done = self.srun(MOBULA, "run", "--", "sh", "-c",
                         "echo rank $RANK/$WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR")
        self.assertEqual(done.returncode, 0, done.stdout)
        for rank in (0, 1):
            self.assertIn(f"[rank {rank}] rank {rank}/2 local 0 at 127.0.0.1", done.stdout)
        self.assertEqual(self.node_dirs(), before, "a run that succeeded leaves its directories")

    def test_one_task_a_rank(self):
        """srun starts a task for each rank, as for torch: two a node, and the gang has four ranks."""
        done = self.srun(MOBULA, "run", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE", tasks=2)
        self.assertEqual(done.returncode, 0, (done.stdout, self.node_logs()))
        self.assertEqual(sorted(re.findall(r"rank (\d) of 4", done.stdout)), list("0123"), done.stdout)

    def test_one_node_needs_no_token(self):
        done = self.srun(MOBULA, "run", "--", "sh", "-c", "echo alone $WORLD_SIZE", nodes=1)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("alone 1", done.stdout)

    def test_train(self):
        store = f"{self.slurm.dir}/store"
        command = train_command(f"file://{store}", 4, "--save-interval", "2")
        i = command.index("--num-nodes")
        done = self.srun(MOBULA, *command[1:i], *command[i + 2:])
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"iteration +4/ +4 ")
        self.assertEqual((pathlib.Path(store) / "latest_checkpointed_iteration.txt").read_text(), "4")

    def test_a_rank_that_fails(self):
        done = self.srun(MOBULA, "run", "--", "sh", "-c", 'test "$RANK" = 0 || exit 7; sleep 600')
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"mobula: rank 1 exited with status 7")
        self.assertIn("mobula: logs of this node: ", done.stdout)

    def test_uneven_tasks(self):
        done = self.slurm.run("srun", "-N2", "-n5", "-m", "arbitrary", "-w", "n1,n1,n1,n2,n2",
                              MOBULA, "run", "--", "true")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("different numbers of tasks; use srun --ntasks-per-node", done.stdout)

    def test_too_many_nodes(self):
        done = self.srun(MOBULA, "run", "--num-nodes", "3", "--", "true")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--num-nodes 3: the Slurm step has 2", done.stdout)

    def test_scancel_lets_the_ranks_finish(self):
        """SIGTERM of Slurm goes to the driver, which stops the gang in order."""
        srun = self.slurm.start("srun", "-N2", "-n2", MOBULA, "run", "--", "sh", "-c",
                                "trap 'echo saved by $RANK; exit 0' TERM; echo up; "
                                "while :; do sleep 0.1; done")
        for _ in range(2):  # both have their traps
            self.wait_for_line(srun, "up")
        job = self.slurm.run("squeue", "-h", "-o", "%A").stdout.strip()
        self.slurm.run("scancel", job)
        out = srun.communicate(timeout=180)[0]
        self.assertIn("saved by 0", out)
        self.assertIn("saved by 1", out)

    def test_killed_driver_ends_the_step(self):
        srun = self.slurm.start("srun", "-N2", "-n2", MOBULA, "run", "--lease", "2s", "--", "sh", "-c",
                                "echo up; sleep 600")
        self.wait_for_line(srun, "up")
        [driver] = [p for p in pids_with_environment("SLURM_PROCID=0")
                    if " run " in command_of(p) and pathlib.Path(f"/proc/{p}/task/{p}/children")
                    .read_text().strip() == "" and "mobula run" in command_of(p).replace(str(MOBULA), "mobula")]
        os.kill(driver, signal.SIGKILL)
        srun.communicate(timeout=180)
        self.assertNotEqual(srun.returncode, 0)


if __name__ == "__main__":
    unittest.main()

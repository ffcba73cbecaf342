"""--async-save: the same training and the same files as without, whole at any kill. Usage: test_async_save.py WORKER BAD_DISK"""

import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import unittest

from gang import MOCK, MODEL, Gang, Hold, content, iterations, lose_in_save, run

WORKER, BAD_DISK = (os.path.abspath(sys.argv.pop(1)) for _ in range(2))
ENDLESS = ["--train-iters", "20000", "--eval-interval", "20000"]


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-async-")
        self.addCleanup(self.folder.cleanup)

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)


class AsyncSave(Folder):
    def tracker(self, name):
        with open(self.path(name, "latest_checkpointed_iteration.txt"), encoding="ascii") as f:
            return int(f.read())

    def gang(self, world, name, *args):
        gang = Gang(WORKER, world, [*MODEL, *MOCK, *args], self.path(name))
        self.addCleanup(gang.kill)
        return gang.start()

    def test_the_same_bytes_and_losses(self):
        for extra in ([], ["--use-distributed-optimizer"]):
            tag = str(len(extra))
            args = [*MODEL, *MOCK, "--train-iters", "20", "--save-interval", "4", *extra]
            plain = run(WORKER, 2, [*args, "--save", self.path("p" + tag)], self.path("plain" + tag))
            late = run(WORKER, 2, [*args, "--async-save", "--save", self.path("a" + tag)], self.path("late" + tag))
            self.assertEqual(iterations(plain.ranks[1]), iterations(late.ranks[1]))
            for iteration in ("iter_0000004", "iter_0000012", "iter_0000020"):
                a, b = content(self.path("p" + tag, iteration)), content(self.path("a" + tag, iteration))
                ours, theirs = json.loads(b.pop("state.json")), json.loads(a.pop("state.json"))
                self.assertEqual(a, b)
                self.assertTrue(ours["args"].pop("async_save"))
                self.assertFalse(theirs["args"].pop("async_save"))
                del ours["args"]["save"], theirs["args"]["save"], ours["crc64nvme"], theirs["crc64nvme"]
                self.assertEqual(ours, theirs)
            self.assertEqual(sorted(os.listdir(self.path("a" + tag)))[-1], "latest_checkpointed_iteration.txt")
            self.assertEqual(self.tracker("a" + tag), 20)
            for gang in (plain, late):
                for rank in gang.ranks:
                    self.assertEqual([m["iteration"] for m in rank.of("saved")], [4, 8, 12, 16, 20])
                    self.assertTrue(all(min(m["write_ms"], m["stall_ms"]) >= 0 for m in rank.of("saved")))
                self.assertEqual(re.findall(r"saved iteration (\d+): stalled \d+\.\d ms, written in \d+\.\d+ s, "
                                            r"\d+\.\d MB/s\n", gang.ranks[0].log()), ["4", "8", "12", "16", "20"])
            self.assertIn("host memory: snapshot of a save", late.ranks[0].log())
            self.assertNotIn("host memory: snapshot of a save", plain.ranks[0].log())
            self.assertIn("scheduled an async checkpoint save at iteration       4 to", late.ranks[0].log())
            for name in ("--load", self.path("a" + tag)), ("--load", self.path("p" + tag)):
                rest = run(WORKER, 2, [*args, *name, "--train-iters", "22", "--override-opt_param-scheduler"],
                           self.path("rest" + tag + name[1][-2]))
                self.assertEqual(sorted(iterations(rest.ranks[1])), [21, 22])

    def test_save_now_stop_and_sigterm(self):
        gang = self.gang(2, "run", *ENDLESS, "--async-save", "--save", self.path("s"), "--save-interval", "100000000")
        gang.reached(2)
        gang.ranks[1].tell(t="save_now", text="a deadline")
        gang.wait(lambda: all(r.of("saved") for r in gang.ranks))
        at = {r.of("saved")[0]["iteration"] for r in gang.ranks}
        self.assertEqual(len(at), 1, "the ranks saved different iterations")
        self.assertEqual(self.tracker("s"), at.pop())
        gang.ranks[0].process.send_signal(signal.SIGTERM)
        self.assertEqual(gang.finish(), [0, 0])
        done = gang.ranks[0].of("done")[0]["iteration"]
        self.assertEqual([r.of("saved")[-1]["iteration"] for r in gang.ranks], [done, done])
        self.assertEqual(self.tracker("s"), done)
        kinds = [m["t"] for m in gang.ranks[0].messages]
        self.assertLess(len(kinds) - 1 - kinds[::-1].index("saved"), kinds.index("done"))

    def test_killed_at_any_moment(self):
        """The tracker names a whole checkpoint, never an older one; what is left over goes away."""
        args = [*ENDLESS, "--async-save", "--save", self.path("s"), "--save-interval", "1", "--load", self.path("s")]
        rng = random.Random(20261122)
        saved = 0
        for attempt in range(6):
            gang = self.gang(2, f"run{attempt}", *args)
            gang.reached(saved + 3)
            time.sleep(rng.uniform(0, 0.05))  # the moment of the kill is the subject of this test
            gang.kill()
            if saved:
                found = int(re.search(r"successfully loaded checkpoint from \S+ .* at iteration (\d+)",
                                      gang.ranks[0].log()).group(1))
                self.assertEqual(found, saved)
            now = self.tracker("s")
            self.assertGreater(now, saved)
            told = [m["iteration"] for r in gang.ranks for m in r.of("saved")]
            self.assertLessEqual(max(told, default=0), now, "a report came before the tracker")
            saved = now
        run(WORKER, 1, [*MODEL, *MOCK, *args, "--exit-interval", "1"], self.path("last"))
        self.assertEqual([n for n in os.listdir(self.path("s")) if n.startswith(".")], [])

    def test_a_write_that_fails_ends_the_run(self):
        """The file may not grow as far as it must: what a full disk does, without one."""
        gang = self.gang(2, "run", *ENDLESS, "--async-save", "--save", self.path("s"), "--save-interval", "100000000")
        gang.reached(2)
        gang.ranks[0].tell(t="save_now", text="a first one")
        gang.wait(lambda: all(r.of("saved") for r in gang.ranks))
        whole = self.tracker("s")
        resource.prlimit(gang.ranks[1].process.pid, resource.RLIMIT_FSIZE, (100000, 100000))
        gang.ranks[0].tell(t="save_now", text="one too many")
        self.assertEqual(gang.finish(), [69, 73])
        self.assertRegex(gang.ranks[1].of("failed")[0]["text"],
                         r"checkpoint of iteration \d+: .*optim_dp_001_of_002.safetensors.*File too large")
        self.assertRegex(gang.ranks[0].of("failed")[0]["text"], "rank 1 (failed|gave up)")
        self.assertEqual(self.tracker("s"), whole)
        self.assertEqual(sorted(os.listdir(self.path("s"))), [f"iter_{whole:07d}", "latest_checkpointed_iteration.txt"])
        for rank in gang.ranks:
            self.assertEqual([m["iteration"] for m in rank.of("saved")], [whole])

    def test_a_failed_run_keeps_what_it_began_to_save(self):
        """A loss that is no number ends the run right after a save began: the save is ended first."""
        gang = Gang(WORKER, 2, [*MODEL, *MOCK, "--train-iters", "20000", "--eval-interval", "20000", "--async-save",
                                "--save", self.path("s"), "--save-interval", "1", "--lr", "1e38", "--clip-grad", "0"],
                    self.path("run"))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [65, 65])
        last = gang.ranks[0].of("progress")[-1]["iteration"]
        self.assertEqual(self.tracker("s"), last)
        for rank in gang.ranks:
            self.assertIn("is not finite", rank.of("failed")[0]["text"])
            self.assertEqual(rank.of("saved")[-1]["iteration"], last)

    def test_a_lost_rank_ends_a_save_in_flight(self):
        """Both ways to save: the rank whose disk stands still is lost, or the one that is through."""
        for n, (more, held, lost) in enumerate(itertools.product(([], ["--async-save"]), (0, 1), (0, 1))):
            with self.subTest(more=more, held=held, lost=lost):
                file = "optim_dp_001_of_002.safetensors" if held else "model_tp00_pp00.safetensors"
                hold = Hold(BAD_DISK, self.path(f"pipe-{n}"), held, file)
                words = [*MODEL, *MOCK, *ENDLESS, *more, "--save", self.path(f"s{n}"), "--save-interval", "3"]
                lose_in_save(self, hold, lost, Gang(WORKER, 2, words, self.path(f"run-{n}"), env_of_rank=hold.env_of_rank))
                self.assertEqual([name for name in os.listdir(self.path(f"s{n}")) if not name.startswith(".")], [])


class KeepLast(Folder):
    """Older checkpoints go, by both ways to save; what is not durable stays where something has to be durable."""

    def iterations_in(self, name):
        return sorted(int(n[5:]) for n in os.listdir(self.path(name)) if n.startswith("iter_"))

    def test_without_a_store(self):
        for flags in ([], ["--async-save"]):
            name = "s" + str(len(flags))
            args = [*MODEL, *MOCK, "--train-iters", "20", "--save", self.path(name), "--save-interval", "2", *flags]
            run(WORKER, 2, [*args, "--keep-last-k", "3"], self.path("run" + name))
            self.assertEqual(self.iterations_in(name), [16, 18, 20])
            run(WORKER, 1, [*args, "--load", self.path(name), "--save-retain-interval", "9", "--train-iters", "26",
                            "--override-opt_param-scheduler"], self.path("rest" + name))
            self.assertEqual(self.iterations_in(name), [18, 26])
            self.assertEqual(sorted(os.listdir(self.path(name))),
                             ["iter_0000018", "iter_0000026", "latest_checkpointed_iteration.txt"])

    def test_with_a_store(self):
        gang = Gang(WORKER, 2, [*MODEL, *MOCK, *ENDLESS, "--async-save", "--save", self.path("s"), "--save-interval",
                                "100000000", "--keep-last-k", "1"], self.path("run"),
                    env={"MOBULA_CHECKPOINT_URL": "s3://bucket/run", "MOBULA_DURABLE_ITERATION": "-1"})
        self.addCleanup(gang.kill)
        gang.start()

        def save():
            n = len(gang.ranks[0].of("saved"))
            gang.ranks[0].tell(t="save_now", text="again")
            gang.wait(lambda: all(len(r.of("saved")) > n for r in gang.ranks))
            return gang.ranks[0].of("saved")[-1]["iteration"]

        gang.reached(1)
        first, second = save(), save()
        for rank in gang.ranks:
            rank.tell(t="durable", iteration=first)
        third = save()
        for rank in gang.ranks:  # the end of the process: all that was begun is done
            rank.tell(t="stop", text="the user")
        self.assertEqual(gang.finish(), [0, 0])
        done = gang.ranks[0].of("done")[0]["iteration"]
        self.assertEqual(self.iterations_in("s"), sorted({second, third, done}))


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""The plan of memory: what ranks really take is what it says, what does not fit is refused before it is taken, and what it
says would fit does."""

import os
import re
import tempfile
import unittest

from gang import Gang
from layouts import WORKER, plan, write_documents

RUN = ("--distributed-backend gloo --train-iters 2 --lr 1e-4 --lr-decay-style constant --tokenizer-type NullTokenizer "
       "--vocab-size 4000 --eval-iters 0 --log-interval 1 --attention-dropout 0 --hidden-dropout 0").split()
MIB = 1 << 20

# The stated bound: the truth is at most so much above or below the plan.
SHARE, FLAT = 0.05, 16 * MIB


def shape(layers, hidden, heads, seq, micro, batch, *more):
    return [*RUN, "--num-layers", str(layers), "--hidden-size", str(hidden), "--num-attention-heads", str(heads),
            "--seq-length", str(seq), "--max-position-embeddings", str(seq), "--micro-batch-size", str(micro),
            "--global-batch-size", str(batch), *more]


def taken_before(log):
    """Bytes that rank 0 had before the plan's were taken."""
    number, unit = re.search(r"available, (\S+) (\S+) taken by this rank so far", log).groups()
    return float(number) * {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}[unit]


LLAMA = ("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
         "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2").split()
ZERO = ["--use-distributed-optimizer"]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def all_there_is():
    with open("/proc/meminfo", encoding="ascii") as f:
        return sum(int(kb) << 10 for kb in re.findall(r"^(?:MemTotal|SwapTotal): +(\d+) kB", f.read(), re.M))


class Cage:
    """A control group with a limit, of either version; None in .dir: there can be none here."""

    def __init__(self, limit):
        self.dir = None
        with open("/proc/self/cgroup", encoding="ascii") as f:
            groups = f.read()
        one = re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", groups, re.M)
        two = re.search(r"^0::(/.*)$", groups, re.M)
        for found, mount, file, swap in ((one, "/sys/fs/cgroup/memory", "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", limit)),
                                         (two, "/sys/fs/cgroup", "memory.max", ("memory.swap.max", 0))):
            for above in (found.group(1), "/") if found else ():
                path = f"{mount}{above}/mobula-plan-{os.getpid()}"
                try:
                    os.mkdir(path)
                except OSError:
                    continue
                try:
                    with open(f"{path}/{file}", "w", encoding="ascii") as f:
                        f.write(str(limit))
                    if os.path.exists(f"{path}/{swap[0]}"):
                        with open(f"{path}/{swap[0]}", "w", encoding="ascii") as f:
                            f.write(str(swap[1]))
                    self.dir = path
                    return
                except OSError:
                    os.rmdir(path)

    def close(self):
        os.rmdir(self.dir)

    def worker(self, folder):
        """A program that is the worker inside."""
        path = os.path.join(folder, f"caged{os.path.basename(self.dir)}")
        with open(path, "w", encoding="ascii") as f:
            f.write(f'#!/bin/sh\necho $$ > {self.dir}/cgroup.procs || exit 99\nexec {WORKER} "$@"\n')
        os.chmod(path, 0o755)
        return path


class MemoryPlan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-plan-")
        cls.addClassCleanup(cls.folder.cleanup)
        write_documents(os.path.join(cls.folder.name, "data"), 3000)
        cls.n_runs = 0

    def gang(self, world, words, worker=WORKER):
        type(self).n_runs += 1
        gang = Gang(worker, world, [*words, "--data-path", os.path.join(self.folder.name, "data")],
                    os.path.join(self.folder.name, f"run{self.n_runs}"), env={"OPENBLAS_NUM_THREADS": "1"})
        self.addCleanup(gang.kill)
        return gang.start()

    def peaks(self, gang):
        """Bytes each rank had at most."""
        gang.wait(lambda: not gang.open)
        ends = [os.wait4(r.process.pid, 0) for r in gang.ranks]
        self.assertEqual([os.waitstatus_to_exitcode(e[1]) for e in ends], [0] * len(ends), gang.ranks[0].log())
        return [e[2].ru_maxrss * 1024 for e in ends]

    def check(self, world, words):
        gang = self.gang(world, words)
        peaks = self.peaks(gang)
        before = taken_before(gang.ranks[0].log())
        for rank, peak in zip(gang.ranks, peaks):
            told = plan(rank)
            if told:
                expected = before + told["total"]
                print(f"{world} ranks: planned {expected / MIB:.0f} MiB, taken {peak / MIB:.0f} MiB", words[-6:])
                self.assertLess(abs(peak - expected), SHARE * expected + FLAT, (words, told))

    def refused(self, world, words, worker=WORKER):
        """The one line, which rank 0 prints; nothing of the plan was taken."""
        gang = self.gang(world, words, worker)
        gang.wait(lambda: not gang.open)
        ends = [os.wait4(r.process.pid, 0) for r in gang.ranks]
        self.assertEqual([os.waitstatus_to_exitcode(e[1]) for e in ends], [70] * world, gang.ranks[0].log())
        for end in ends:
            self.assertLess(end[2].ru_maxrss << 10, 64 * MIB)
        told = [re.findall(r"^mobula-worker: .*", r.log(), re.M) for r in gang.ranks]
        self.assertEqual([len(t) for t in told], [1] + [0] * (world - 1), told)
        self.assertEqual(len({r.of("failed")[0]["text"] for r in gang.ranks}), 1)
        return told[0][0]

    def test_moments_count(self):
        """Weights and gradients alone would fit; whatever else runs here, all of it never does."""
        layers = int(1.2 * all_there_is() / (16 * 12 * 1024 * 1024))
        line = self.refused(1, shape(layers, 1024, 8, 8, 1, 4))
        self.assertRegex(line, r"the memory plan needs \S+ GiB of host memory, \S+ GiB are available; "
                               r"would fit: --tensor-model-parallel-size \d on \d+ ranks \(\S+ GiB\)$")

    def test_two_ranks_have_half_of_the_moments_each(self):
        cage = Cage(500 * MIB)
        if cage.dir is None:
            self.skipTest("no control group with a limit can be made here")
        self.addCleanup(cage.close)
        line = self.refused(2, shape(22, 256, 8, 8, 1, 4), cage.worker(self.folder.name))
        self.assertRegex(line, r"needs \S+ MiB of host memory for the 2 ranks of a node, \S+ MiB are available; would fit: "
                               r"--use-distributed-optimizer \(\S+ MiB\); --tensor-model-parallel-size 2 \(")

    def test_what_is_advised_fits(self):
        cage = Cage(400 * MIB)
        if cage.dir is None:
            self.skipTest("no control group with a limit can be made here")
        self.addCleanup(cage.close)
        worker = cage.worker(self.folder.name)
        for world, words, kinds in (
                (1, shape(6, 256, 4, 256, 16, 16, *LLAMA), ("--micro-batch-size", "--recompute-granularity")),
                (2, shape(4, 256, 8, 256, 8, 16), ("--micro-batch-size", "--recompute-granularity", "--tensor-model-parallel"))):
            line = self.refused(world, words, worker)
            advice = re.search(r"would fit: (.*)$", line).group(1)
            advised = [re.fullmatch(r"(.*) \((\S+) MiB\)", part).groups() for part in advice.split("; ")]
            for kind in kinds:
                self.assertIn(kind, advice)
            for more, size in advised:
                gang = self.gang(world, [*words, *more.split()], worker)
                peaks = self.peaks(gang)
                self.assertIn(f"host memory: {size} MiB planned", gang.ranks[0].log())
                self.assertLess(sum(peaks), float(size) * MIB + world * FLAT + taken_before(gang.ranks[0].log()) * world, more)

    def test_a_limit_above_counts(self):
        cage = Cage(64 * MIB)
        if cage.dir is None:
            self.skipTest("no control group with a limit can be made here")
        self.addCleanup(cage.close)
        line = self.refused(1, shape(4, 512, 8, 256, 4, 4), cage.worker(self.folder.name))
        self.assertRegex(line, r"needs \S+ MiB of host memory, \S+ MiB are available; ")

    def test_what_is_taken_is_what_was_planned(self):
        save = ["--save", os.path.join(self.folder.name, "saved"), "--save-interval", "2"]
        for world, words in (
                (1, shape(4, 512, 8, 256, 4, 4)),
                (1, shape(8, 256, 4, 512, 8, 8, *LLAMA)),
                (1, shape(8, 256, 4, 512, 8, 8, *FULL)),
                (1, shape(4, 512, 8, 256, 4, 4, "--fp16")),
                (1, shape(4, 512, 8, 256, 2, 4, *save, "--async-save")),
                (2, shape(4, 512, 8, 256, 4, 8, *ZERO)),
                (2, shape(4, 512, 8, 256, 4, 4, *LLAMA, "--tensor-model-parallel-size", "2", *save)),
                (2, shape(4, 512, 8, 256, 2, 8, "--pipeline-model-parallel-size", "2")),
                (2, shape(4, 512, 8, 512, 4, 4, "--context-parallel-size", "2"))):
            with self.subTest(world=world, words=words):
                self.check(world, words)


if __name__ == "__main__":
    unittest.main()

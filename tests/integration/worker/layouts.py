"""What the tests of tensor, pipeline and context parallelism share: models small enough for many runs, and how a run of
some layout is compared with one rank's alone. Usage of each: test_X_parallel.py WORKER"""

import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import unittest

from gang import Gang, content, iterations, losses, numbers, run, validations

WORKER = os.path.abspath(sys.argv.pop(1))

# 500 tokens fill up to 512 rows with 128, 2 * 128 and 4 * 128 alike. Dropout stays on where nothing else is said.
TINY = (
    "--distributed-backend gloo --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --lr 1e-3 "
    "--lr-warmup-iters 2 --log-interval 1 --eval-interval 10 --eval-iters 2 --log-params-norm --split 80,10,10 "
    "--tokenizer-type NullTokenizer --vocab-size 500"
).split()
LLAMA = ("--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 4 "
         "--num-attention-heads 8 --untie-embeddings-and-output-weights --disable-bias-linear --ffn-hidden-size 96").split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
SEQUENCE = "--sequence-parallel"
ZERO = "--use-distributed-optimizer"
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "6000"]
TOLERANCE = 1e-5
ITERATIONS = 20
MODEL_FILE = "model_tp00_pp00.safetensors"


def length(n):
    return ["--seq-length", str(n), "--max-position-embeddings", str(n)]


def split(*more, tensor=1, pipeline=1, context=1, chunks=1):
    sizes = (("tensor-model-parallel-size", tensor), ("pipeline-model-parallel-size", pipeline),
             ("context-parallel-size", context), ("num-virtual-stages-per-pipeline-rank", chunks))
    return [w for name, n in sizes if n > 1 for w in (f"--{name}", str(n))] + list(more)


def write_documents(prefix, vocabulary, n=300):
    """Counting up from somewhere, to an end of document. A few of them: to shuffle the samples of mock data takes a rank
    longer than to train."""
    draw = random.Random(7)
    documents = []
    for _ in range(n):
        first = draw.randrange(vocabulary)
        documents.append([(first + i) % vocabulary for i in range(draw.randrange(10, 60))] + [vocabulary])
    lengths = [len(d) for d in documents]
    with open(prefix + ".bin", "wb") as f:
        for d in documents:
            f.write(struct.pack(f"<{len(d)}i", *d))
    with open(prefix + ".idx", "wb") as f:  # of 32 bit numbers
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, n, n + 1) + struct.pack(f"<{n}i", *lengths) +
                struct.pack(f"<{n}q", *(4 * sum(lengths[:i]) for i in range(n))) + struct.pack(f"<{n + 1}q", *range(n + 1)))


def plan(rank):
    """What a rank prints of its device memory: {part: bytes}."""
    return {name.strip(): int(n) for name, n in re.findall(r"^(.{32}) +\S+ \S+ +(\d+)$", rank.log(), re.M)}


class LayoutCase(unittest.TestCase):
    MODEL = []  # of a class: the words of its smallest model

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-layouts-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.n_runs, cls.references = 0, {}
        for vocabulary in (500, 20):
            write_documents(cls.path(f"to{vocabulary}"), vocabulary)

    @classmethod
    def path(cls, *parts):
        return os.path.join(cls.folder.name, *parts)

    @classmethod
    def words(cls, *extra):
        """With a folder for a run of them."""
        cls.n_runs += 1
        return [*cls.base(), "--train-iters", str(ITERATIONS), *extra], cls.path(f"run{cls.n_runs}")

    @classmethod
    def base(cls):
        return [*TINY, *cls.MODEL, "--data-path", cls.path("to500")]

    @classmethod
    def train(cls, world, *extra):
        return run(WORKER, world, *cls.words(*extra))

    @classmethod
    def alone(cls, *extra):
        """One rank with all of the model: one run, however many are compared with it."""
        if extra not in cls.references:
            cls.references[extra] = cls.train(1, *extra)
        return cls.references[extra]

    def gang(self, world, *extra, **more):
        gang = Gang(WORKER, world, *self.words(*extra), **more)
        self.addCleanup(gang.kill)
        return gang

    def near(self, x, y, what):
        self.assertLess(abs(x - y), TOLERANCE * abs(y), what)

    def assert_same(self, got, want, what, first=1, last=ITERATIONS):
        """Losses and norms of all iterations that got has; first, last: which those have to be."""
        a, b = numbers(got), numbers(want)
        self.assertEqual(max(a), last)
        logged, expected = losses(got), losses(want)
        self.assertEqual(sorted(logged), list(range(first, last + 1)))
        for i, x in logged.items():
            self.near(x, expected[i], f"{what}, iteration {i}")
        for i in set(a) & set(b):
            for x, y in zip(a[i], b[i]):
                self.near(x, y, f"{what}, iteration {i}: {a[i]} and {b[i]}")
        if last == ITERATIONS:
            v, w = validations(got), validations(want)
            self.assertEqual(len(v), len(w) if first <= ITERATIONS // 2 else len(w) - 1)
            for x, y in zip(reversed(v), reversed(w)):
                self.near(x, y, what)

    def check_layout(self, world, layout, model, what):
        """Trains what one rank trains. The last rank, which has the loss, says the numbers; nobody else does."""
        alone, gang = self.alone(*model), self.train(world, *model, *layout)
        self.assert_same(gang, alone, f"{what} on {world} ranks with {layout}")
        self.assertEqual(sorted(iterations(gang.ranks[-1])), list(range(1, ITERATIONS + 1)))
        for rank in gang.ranks[:-1]:
            self.assertEqual(iterations(rank), {})
        norms = [float(re.search(r"params norm: (\S+)", g.ranks[-1].log()).group(1)) for g in (gang, alone)]
        self.assertAlmostEqual(norms[0], norms[1], delta=0.002)
        return gang

    def check_bits(self, world, layout):
        a, b = (self.train(world, *layout) for _ in range(2))
        self.assertEqual(iterations(a.ranks[-1]), iterations(b.ranks[-1]))

    def check_chain(self, name, model, chain):
        """One training, some iterations by each layout, from the checkpoint of the one before. The last has the rest."""
        whole, step, at = self.alone(*model), ITERATIONS // len(chain), 0
        for i, (world, layout) in enumerate(chain):
            to = ITERATIONS if i + 1 == len(chain) else at + step
            leg = self.train(world, *model, *layout, "--save", self.path(f"{name}{i}"), "--save-interval", str(to),
                             *(["--exit-interval", str(to)] if to < ITERATIONS else []),
                             *(["--load", self.path(f"{name}{i - 1}")] if i > 0 else []))
            if i > 0:
                self.assertIn(f"at iteration {at}\n", leg.ranks[0].log())
            self.assert_same(leg, whole, f"{name}: {layout} after {chain[i - 1]}", first=at + 1, last=to)
            # The same files whatever the layout: whole tensors, and a range of the optimizer a rank.
            self.assertEqual(sorted(os.listdir(self.path(f"{name}{i}", f"iter_{to:07}"))),
                             [MODEL_FILE, *(f"optim_dp_{r:03}_of_{world:03}.safetensors" for r in range(world)),
                              "state.json"])
            at = to

    def save(self, world, name, *extra):
        return self.train(world, "--save", self.path(name), "--save-interval", "10", "--exit-interval", "10", *extra)

    def check_no_bit_changes(self, name, model, *layouts):
        """By loading and saving."""
        still = ["--lr", "0", "--override-opt_param-scheduler", "--exit-interval", "3", "--save-interval", "3"]
        self.train(1, *model, "--save", self.path(name), "--save-interval", "2", "--exit-interval", "2")
        want = content(self.path(name, "iter_0000002"))[MODEL_FILE]
        for i, (world, layout) in enumerate(layouts):
            to = self.path(f"{name}-{i}")
            self.train(world, *model, *layout, "--load", self.path(name), "--save", to, *still)
            self.assertEqual(content(os.path.join(to, "iter_0000003"))[MODEL_FILE], want)

    def check_lost_rank(self, world, layout, victim):
        """All others name it."""
        gang = self.gang(world, *layout, "--train-iters", "100000", "--eval-interval", "100000")
        gang.start().reached(3)
        gang.ranks[victim].process.send_signal(signal.SIGKILL)
        since = time.monotonic()
        codes = gang.finish()
        self.assertLess(time.monotonic() - since, 10)
        self.assertEqual([c for r, c in enumerate(codes) if r != victim], [69] * (world - 1))
        for r, rank in enumerate(gang.ranks):
            if r != victim:
                self.assertIn(f"rank {victim} went away", rank.of("failed")[0]["text"])
                self.assertIn(f"mobula-worker: {rank.of('failed')[0]['text']}\n", rank.log())

    def check_stopped_rank(self, world, layout, victim):
        """All name it, and none that only waits, too, when an operation has taken its minute."""
        gang = self.gang(world, *layout, "--train-iters", "100000", "--eval-interval", "100000",
                         "--distributed-timeout-minutes", "1")
        gang.start().reached(3)
        stopped = gang.ranks[victim]
        stopped.process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        gang.wait(lambda: gang.open == [stopped])
        took = time.monotonic() - since
        stopped.process.send_signal(signal.SIGCONT)
        self.assertNotIn(0, gang.finish())
        self.assertTrue(58 < took < 75, took)
        for rank in gang.ranks:
            text = rank.of("failed")[0]["text"]
            self.assertEqual(re.findall(r"timeout of .*", text), [f"timeout of 60 s: rank {victim} does not answer"])
            self.assertIn(f"mobula-worker: {text}\n", rank.log())

    def check_refused(self, world, layout, text):
        gang = self.gang(world, "--train-iters", "1", *layout)
        codes = gang.finish()
        self.assertTrue(all(c in (2, 64, 69, 78) for c in codes), codes)
        self.assertIn(text, gang.ranks[0].log())

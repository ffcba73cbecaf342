"""Data, tensor, pipeline and context parallel on two GPUs, and on four where there are so many: the CPU's losses however gradients are summed, its
checkpoints both ways, a rank that dies, gangs under agents. MOBULA_WORKER and MOBULA_BIN are the programs, gang.py and cluster.py have to be
on the path; runs on a machine with two NVIDIA GPUs and NCCL, and needs Python's standard library only. MOBULA_PARALLEL_RESULTS: a file that
gets what was measured."""

import contextlib
import glob
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import unittest

import gang
from cluster import Cluster, iterations_of, wait_until

WORKER = os.environ["MOBULA_WORKER"]
MODEL = ("--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 "
         "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1 "
         "--eval-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 ").split()
N = ["--train-iters", "12"]
CPU, BF16 = ["--distributed-backend", "gloo"], ["--bf16"]
SHARDED = ["--use-distributed-optimizer"]
MEANWHILE = ["--overlap-grad-reduce", "--ddp-bucket-size", "100000"]
FOUR = ["--hidden-size", "256", "--num-attention-heads", "4"]  # heads for four
PP2, PP4 = ["--pipeline-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "4"]
CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]  # the interleaved schedule
CP2 = ["--context-parallel-size", "2"]
LLAMA = ("--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 1 "
         "--untie-embeddings-and-output-weights --disable-bias-linear").split()
TP2, TP4, ROWS = (["--tensor-model-parallel-size", "2"], ["--tensor-model-parallel-size", "4"], ["--sequence-parallel"])
RESULTS = []


def n_gpus():
    return len(glob.glob("/dev/nvidia[0-9]*"))


def record(what, **figures):
    """Printed, and kept at once: a run may be cut short."""
    RESULTS.append({"what": what, **figures})
    print("  " + json.dumps(RESULTS[-1]), flush=True)
    if os.environ.get("MOBULA_PARALLEL_RESULTS"):
        pathlib.Path(os.environ["MOBULA_PARALLEL_RESULTS"]).write_text(json.dumps(RESULTS, indent=1) + "\n")


def losses(log):
    return {int(i): float(x) for i, x in re.findall(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)", log)}


def figures(log):
    return re.findall(r"lm loss: \S+|grad norm: \S+|params norm: \S+", log)


class Gpus(unittest.TestCase):
    """Ranks with a GPU each."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-gpu-")
        self.addCleanup(folder.cleanup)
        self.dir, self.n = folder.name, 0

    def start(self, world, *args, env=()):
        self.n += 1
        return gang.Gang(WORKER, world, [*MODEL, *args], os.path.join(self.dir, f"run{self.n}"), env=env,
                         env_of_rank=lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)})

    def train(self, world, *args, env=()):
        """The log of the last rank, which has the losses, behind that of the first."""
        ranks = self.start(world, *args, env=env)
        try:
            codes = ranks.start().finish()
        finally:
            ranks.kill()
        logs = [r.log() for r in ranks.ranks]
        self.assertEqual(set(codes), {0}, "\n".join(logs))
        return "\n".join(dict.fromkeys([logs[0], logs[-1]]))

    def assert_close(self, what, got, want, bound):
        self.assertEqual(sorted(got), sorted(want))
        worst = max(abs(got[i] - want[i]) / want[i] for i in want)
        record(what, iterations=len(want), apart=float(f"{worst:.2e}"), bound=bound)
        self.assertLessEqual(worst, bound)


class Parallel(Gpus):
    def test_losses(self):
        want = losses(self.train(1, *N, *CPU))
        self.assertEqual(len(want), 12)
        ways = {"all-reduce": [], "sharded": SHARDED, "meanwhile": MEANWHILE, "sharded, meanwhile": SHARDED + MEANWHILE}
        for name, args in ways.items():
            with self.subTest(name):
                log = self.train(2, *N, *args)
                self.assertRegex(log, r"> NCCL \d+\.\d+\.\d+ between GPUs; rank 0 of 2: ")
                self.assert_close(f"two GPUs, {name}", losses(log), want, 1e-4)
        one, two = (losses(self.train(world, *N, *BF16)) for world in (1, 2))
        self.assert_close("bf16, one GPU and the CPU", one, want, 2e-2)
        self.assert_close("bf16, two GPUs and the CPU", two, want, 2e-2)

    def test_two_gpus_share_a_model(self):
        want = losses(self.train(1, *N, *CPU))
        tp = ["--tensor-model-parallel-size", "2"]
        ways = {"tensor parallel": [], "sequence parallel": ["--sequence-parallel"], "sharded": SHARDED}
        for name, args in ways.items():
            with self.subTest(name):
                log = self.train(2, *N, *tp, *args)
                self.assertRegex(log, r"> NCCL \d+\.\d+\.\d+ between GPUs; rank 0 of 2 ")
                self.assert_close(f"two GPUs, {name}", losses(log), want, 1e-4)
        self.assert_close("bf16, two GPUs and the CPU", losses(self.train(2, *N, *tp, *BF16)), want, 2e-2)
        folder = os.path.join(self.dir, "shared")
        save = [*N, "--save", folder, "--save-interval", "6"]
        self.train(2, *save, *tp, "--exit-interval", "6")
        rest = losses(self.train(1, *N, *CPU, "--load", folder))
        self.assert_close("six iterations on two GPUs, six on the CPU", rest, {i: want[i] for i in rest}, 1e-4)
        self.assertEqual(sorted(rest), list(range(7, 13)))

    def test_fp16(self):
        """However two GPUs share the work; a scale that is too large at first is made smaller by both alike."""
        scale = ["--fp16", "--initial-loss-scale", "65536"]
        want = losses(self.train(1, *N, *CPU))
        ways = {"data parallel, sharded": SHARDED + MEANWHILE, "tensor parallel": TP2 + ROWS, "stages": PP2 + SHARDED}
        for name, args in ways.items():
            with self.subTest(name):
                self.assert_close(f"fp16, two GPUs and the CPU, {name}", losses(self.train(2, *N, *scale, *args)), want, 5e-3)
        seen = {}
        for name, world, args in (("alone", 1, []), *((name, 2, args) for name, args in ways.items())):
            log = self.train(world, "--train-iters", "20", "--fp16", *args)
            seen[name] = re.findall(r"loss scale: (\S+) \|.*number of skipped iterations: +(\d+)", log)
        record("fp16, from 2^32 on", scales=seen["alone"])
        self.assertGreater(sum(int(skipped) for _, skipped in seen["alone"]), 0)
        for name in ways:
            self.assertEqual(seen[name], seen["alone"], name)

    def test_fp8(self):
        """Ranks that share a layer have scales of their own; however two GPUs share the work the losses are one GPU's in bf16, about."""
        for style, more, ways in (
                ("GPT-2's style", [], {"tensor parallel": TP2, "sequence parallel": TP2 + ROWS}),
                ("Llama's style", [*LLAMA, "--num-query-groups", "2"],
                 {"sequence parallel": TP2 + ROWS, "stages": PP2, "data parallel, sharded": SHARDED + MEANWHILE})):
            want = losses(self.train(1, *N, *BF16, *more))
            for name, args in ways.items():
                with self.subTest(f"{style}, {name}"):
                    got = losses(self.train(2, *N, *BF16, "--fp8-format", "hybrid", *more, *args))
                    self.assertNotEqual(got, want)
                    self.assert_close(f"fp8 and bf16, {style}, {name}", got, want, 1e-2)

    def test_strips(self):
        """Of rows, whose sums run beside the products of others: the losses stay, and the bits from run to run."""
        strips = {"MOBULA_TENSOR_STRIPS": "4"}
        for style, more in (("GPT-2's style", []), ("Llama's style", [*LLAMA, "--num-query-groups", "2"])):
            want = losses(self.train(1, *N, *CPU, *more))
            for name, args in (("tensor parallel", TP2), ("sequence parallel", TP2 + ROWS + SHARDED + MEANWHILE)):
                with self.subTest(style=style, name=name):
                    self.assert_close(f"four strips, {style}, {name}", losses(self.train(2, *N, *more, *args, env=strips)), want, 1e-4)
                    args = [*N, *more, *args, *BF16, "--deterministic-mode", "--log-params-norm"]
                    logs = [self.train(2, *args, env=strips) for _ in range(2)]
                    self.assertEqual(len(figures(logs[0])), 36)
                    self.assertEqual(figures(logs[0]), figures(logs[1]))
                    self.assert_close(f"bf16, four strips, {style}, {name}", losses(logs[0]), want, 2e-2)

    def test_two_gpus_are_stages(self):
        """Of a pipeline, with a tied embedding and without; a checkpoint of stages goes on alone, and one of the CPU in stages."""
        want = losses(self.train(1, *N, *CPU))
        untied = ["--untie-embeddings-and-output-weights"]
        ways = {"1F1B": ([], want), "sharded": (SHARDED, want), "evaluations": (["--eval-iters", "4", "--eval-interval", "2"], want),
                "untied": (untied, losses(self.train(1, *N, *CPU, *untied)))}
        for name, (args, expected) in ways.items():
            with self.subTest(name):
                self.assert_close(f"two stages, {name}", losses(self.train(2, *N, *PP2, *args)), expected, 1e-4)
        self.assert_close("bf16, two stages and the CPU", losses(self.train(2, *N, *PP2, *BF16)), want, 2e-2)
        where, got = os.path.join(self.dir, "stages"), {}
        for last, (world, args) in enumerate(((2, PP2), (1, CPU), (2, PP2 + SHARDED + ["--async-save"]), (1, [])), 1):
            got.update(losses(self.train(world, *N, "--save", where, "--load", where, "--save-interval", "3",
                                         "--exit-interval", str(3 * last), *args)))
        self.assert_close("checkpoints, stages", got, want, 1e-4)

    def test_two_gpus_are_stages_with_chunks(self):
        """In a ring, by the interleaved schedule; so many micro batches as stages are all on their way forward first."""
        deep = [*N, "--num-layers", "4"]
        want = losses(self.train(1, *deep, *CPU))
        untied = ["--untie-embeddings-and-output-weights"]
        few = ["--global-batch-size", "4"]
        ways = {"tied": ([], want), "sharded, meanwhile": (SHARDED + MEANWHILE, want),
                "evaluations": (["--eval-iters", "4", "--eval-interval", "2"], want),
                "untied": (untied, losses(self.train(1, *deep, *CPU, *untied))), "two micro batches": (few, losses(self.train(1, *deep, *CPU, *few)))}
        for name, (args, expected) in ways.items():
            with self.subTest(name):
                self.assert_close(f"two stages of two chunks, {name}", losses(self.train(2, *deep, *PP2, *CHUNKS, *args)), expected, 1e-4)
        self.assert_close("bf16, two stages of two chunks and the CPU", losses(self.train(2, *deep, *PP2, *CHUNKS, *BF16)), want, 2e-2)
        where, got = os.path.join(self.dir, "chunks"), {}
        for last, (world, args) in enumerate(((2, PP2 + CHUNKS), (1, CPU), (2, PP2), (2, PP2 + CHUNKS + SHARDED)), 1):
            got.update(losses(self.train(world, *deep, "--save", where, "--load", where, "--save-interval", "3",
                                         "--exit-interval", str(3 * last), *args)))
        self.assert_close("checkpoints, chunks", got, want, 1e-4)

    def test_two_gpus_share_samples(self):
        """Keys and values go round, with dropout on attention, and without any on Llama's form; checkpoints both ways."""
        want = losses(self.train(1, *N, *CPU))
        ways = {"all-reduce": ([], want), "sharded, meanwhile": (SHARDED + MEANWHILE, want),
                "evaluations": (["--eval-iters", "4", "--eval-interval", "2"], want), "Llama": (LLAMA, losses(self.train(1, *N, *CPU, *LLAMA)))}
        for name, (args, expected) in ways.items():
            with self.subTest(name):
                log = self.train(2, *N, *CP2, *args)
                self.assertIn("> initialized context parallel with size 2\n", log)
                self.assertRegex(log, r"> NCCL \d+\.\d+\.\d+ between GPUs; rank 0 of 2")
                self.assert_close(f"two GPUs share samples, {name}", losses(log), expected, 1e-4)
        self.assert_close("two GPUs share samples, and one GPU", losses(self.train(2, *N, *CP2)), losses(self.train(1, *N)), 1e-4)
        self.assert_close("bf16, two GPUs share samples, and the CPU", losses(self.train(2, *N, *CP2, *BF16)), want, 2e-2)
        fp16 = ["--fp16", "--initial-loss-scale", "65536"]
        self.assert_close("fp16, two GPUs share samples, and the CPU", losses(self.train(2, *N, *CP2, *fp16)), want, 5e-3)
        where, got = os.path.join(self.dir, "samples"), {}
        for last, (world, args) in enumerate(((2, CP2), (1, CPU), (2, CP2 + SHARDED + ["--async-save"]), (1, [])), 1):
            got.update(losses(self.train(world, *N, "--save", where, "--load", where, "--save-interval", "3",
                                         "--exit-interval", str(3 * last), *args)))
        self.assert_close("checkpoints, shared samples", got, want, 1e-4)
        args = [*N, *CP2, *BF16, *SHARDED, "--deterministic-mode", "--log-params-norm"]
        first, second = (figures(self.train(2, *args)) for _ in range(2))
        self.assertEqual(len(first), 36)
        self.assertEqual(first, second)

    def test_checkpoints_go_everywhere(self):
        """Three iterations on two GPUs, one GPU, the CPU, and two GPUs again are twelve on the CPU."""
        want = losses(self.train(1, *N, *CPU))
        for name, two in (("whole", []), ("sharded", [*SHARDED, *MEANWHILE, "--async-save"])):
            with self.subTest(name):
                where, got = os.path.join(self.dir, name), {}
                keep = ["--save", where, "--load", where, "--save-interval", "3"]
                for last, (world, args) in enumerate(((2, two), (1, []), (1, CPU), (2, two)), 1):
                    log = self.train(world, *N, *keep, "--exit-interval", str(3 * last), *args)
                    self.assertIn(f"successfully saved checkpoint from iteration {3 * last:7d}", log)
                    got.update(losses(log))
                self.assert_close(f"checkpoints, {name}", got, want, 1e-4)

    def test_runs_give_the_same_bits(self):
        args = [*N, *BF16, *SHARDED, *MEANWHILE, "--deterministic-mode", "--log-params-norm"]
        first, second = (figures(self.train(2, *args)) for _ in range(2))
        self.assertEqual(len(first), 36)
        self.assertEqual(first, second)

    def test_a_death_is_one_line(self):
        self.end_a_rank(*MEANWHILE)

    def test_a_death_of_a_stage_is_one_line(self):
        """Also where a step is more than a GPU has room for in its queue."""
        self.end_a_rank(*PP2, "--num-layers", "96", "--global-batch-size", "16")

    def test_a_death_in_a_ring_of_keys_is_one_line(self):
        self.end_a_rank(*CP2, "--num-layers", "96", "--global-batch-size", "16")

    def test_a_death_of_a_stage_with_chunks_is_one_line(self):
        self.end_a_rank(*PP2, *CHUNKS, "--num-layers", "96", "--global-batch-size", "16")

    def end_a_rank(self, *args):
        ranks = self.start(2, "--train-iters", "1000000", *args)
        try:
            ranks.start().reached(5)
            killed = time.monotonic()
            ranks.ranks[1].process.send_signal(signal.SIGKILL)
            codes = ranks.finish()
        finally:
            ranks.kill()
        lines = [line for line in ranks.ranks[0].log().splitlines() if line.startswith("mobula-worker: ")]
        print(f"  {time.monotonic() - killed:.2f} s: {lines}", flush=True)
        self.assertEqual(codes[1], -signal.SIGKILL)
        self.assertNotEqual(codes[0], 0)
        self.assertEqual(len(lines), 1)
        self.assertIn("rank 1 went away", lines[0])

    def test_a_hang_ends_all(self):
        """A rank that is stopped, not ended, in the middle of a step: the others give up with a line each when a collective has taken as
        long as it may; the one that was stopped follows when it goes on. Nothing is left."""
        world = min(4, n_gpus())
        for name, args in (("data parallel", MEANWHILE), ("tensor parallel", [*FOUR, "--tensor-model-parallel-size", str(world), *ROWS])):
            with self.subTest(name):
                self.stop_a_rank(world, name, *args)

    def stop_a_rank(self, world, name, *args):
        ranks = self.start(world, "--train-iters", "1000000", "--distributed-timeout-minutes", "1", *args)
        hung, others = ranks.ranks[-1], ranks.ranks[:-1]
        try:
            ranks.start().reached(5)
            hung.process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            codes = [r.process.wait(120) for r in others]
            took = time.monotonic() - stopped
            hung.process.send_signal(signal.SIGCONT)
            codes.append(hung.process.wait(30))
        finally:
            hung.process.send_signal(signal.SIGCONT)
            ranks.kill()
        lines = [[line for line in r.log().splitlines() if line.startswith("mobula-worker: ")] for r in ranks.ranks]
        record(f"a rank hangs, {name}, {world} GPUs", seconds=round(took, 2), statuses=codes, lines=lines)
        self.assertNotIn(0, codes)
        self.assertGreaterEqual(took, 58)
        self.assertEqual({len(said) for said in lines}, {1}, lines)
        first = [said[0] for said in lines[:-1] if "timeout of 60 s" in said[0]]
        self.assertTrue(first, lines)
        for line in first:
            self.assertRegex(line, r"(all-reduce|reduce-scatter|all-gather) \d+ between GPUs \(\d+ elements\): timeout of 60 s")
            self.assertIn(f"rank {world - 1} does not answer", line)

    def test_one_gpu_for_two_is_refused(self):
        """NCCL says why."""
        ranks = gang.Gang(WORKER, 2, [*MODEL, *N], os.path.join(self.dir, "same"), env={"CUDA_VISIBLE_DEVICES": "0"})
        try:
            codes = ranks.start().finish()
        finally:
            ranks.kill()
        lines = [line for r in ranks.ranks for line in r.log().splitlines() if line.startswith("mobula-worker: ")]
        print("  " + "\n  ".join(lines), flush=True)
        self.assertNotIn(0, codes)
        self.assertTrue(any("NCCL: " in line for line in lines), lines)


@unittest.skipIf(n_gpus() < 4, f"{n_gpus()} GPUs here, four are needed")
class OnFour(Gpus):
    def test_losses(self):
        """One, two and four GPUs agree, whatever they share."""
        want = losses(self.train(1, *N, *FOUR, *CPU))
        self.assertEqual(len(want), 12)
        ways = {"data parallel": [], "sharded, meanwhile": SHARDED + MEANWHILE, "a model on four": TP4, "a model on four, sequence parallel": TP4 + ROWS,
                "two stages of two, data parallel": PP2 + SHARDED + MEANWHILE,
                "two stages of two, tensor parallel": PP2 + TP2 + ROWS, "samples by two, a model on two": CP2 + TP2 + ROWS + SHARDED,
                "samples by two, two stages": CP2 + PP2 + SHARDED + MEANWHILE, "samples by two, data parallel": CP2 + MEANWHILE,
                "two models on two each": TP2 + MEANWHILE, "two models on two each, sequence parallel, sharded": TP2 + ROWS + SHARDED + MEANWHILE}
        for world, name, args in [(1, "alone", []), (2, "data parallel", SHARDED), *((4, name, args) for name, args in ways.items())]:
            with self.subTest(name, world=world):
                self.assert_close(f"{world} GPUs and the CPU, {name}", losses(self.train(world, *N, *FOUR, *args)), want, 1e-4)
        deep = [*N, *FOUR, "--num-layers", "4"]
        alone = losses(self.train(1, *deep, *CPU))
        self.assert_close("4 GPUs and the CPU, four stages", losses(self.train(4, *deep, *PP4)), alone, 1e-4)
        for name, args in (("data parallel", SHARDED + MEANWHILE), ("tensor parallel", TP2 + ROWS)):
            with self.subTest(name, chunks=2):
                got = losses(self.train(4, *deep, *PP2, *CHUNKS, *args))
                self.assert_close(f"4 GPUs and the CPU, two stages of two chunks, {name}", got, alone, 1e-4)
        deep += ["--num-layers", "8"]
        self.assert_close("4 GPUs and the CPU, four stages of two chunks", losses(self.train(4, *deep, *PP4, *CHUNKS)),
                          losses(self.train(1, *deep, *CPU)), 1e-4)
        for name, args in (("sharded, meanwhile", SHARDED + MEANWHILE), ("two models on two each, sequence parallel", TP2 + ROWS + SHARDED)):
            with self.subTest(name, dtype="bf16"):
                self.assert_close(f"bf16, 4 GPUs and the CPU, {name}", losses(self.train(4, *N, *FOUR, *BF16, *args)), want, 2e-2)

    def test_four_share_samples(self):
        """With fp32 and, by the kernels on matrix units, bf16: all four, and two that share models as well."""
        want = losses(self.train(1, *N, *FOUR, *CPU))
        cp4 = ["--context-parallel-size", "4"]
        ways = {"all": (cp4, 1e-4), "bf16, all": (cp4 + BF16, 2e-2), "bf16, by two, a model on two": (CP2 + TP2 + ROWS + BF16, 2e-2),
                "bf16, two of two": (CP2 + SHARDED + MEANWHILE + BF16, 2e-2)}
        for name, (args, bound) in ways.items():
            with self.subTest(name):
                self.assert_close(f"4 GPUs share samples and the CPU, {name}", losses(self.train(4, *N, *FOUR, *args)), want, bound)
        args = [*N, *FOUR, *cp4, *BF16, "--deterministic-mode", "--log-params-norm"]
        first, second = (figures(self.train(4, *args)) for _ in range(2))
        self.assertEqual(len(first), 36)
        self.assertEqual(first, second)

    def test_checkpoints_go_everywhere(self):
        """Three iterations each on four GPUs that share models by two, the CPU, four GPUs by themselves, and one are twelve on the CPU; and so
        with a model on four."""
        want = losses(self.train(1, *N, *FOUR, *CPU))
        alone, by_two = (4, SHARDED + MEANWHILE + ["--async-save"]), (4, TP2 + SHARDED + MEANWHILE)
        for name, order in (("by two first", (by_two, (1, CPU), alone, (1, []))), ("all share one", (alone, (4, TP4 + ROWS), (1, []), by_two))):
            with self.subTest(name):
                where, got = os.path.join(self.dir, name.replace(" ", "-")), {}
                for last, (world, args) in enumerate(order, 1):
                    log = self.train(world, *N, *FOUR, "--save", where, "--load", where, "--save-interval", "3", "--exit-interval", str(3 * last), *args)
                    self.assertIn(f"successfully saved checkpoint from iteration {3 * last:7d}", log)
                    got.update(losses(log))
                self.assert_close(f"checkpoints, {name}", got, want, 1e-4)

    def test_runs_give_the_same_bits(self):
        args = [*N, *FOUR, *BF16, *SHARDED, *MEANWHILE, "--deterministic-mode", "--log-params-norm"]
        first, second = (figures(self.train(4, *args)) for _ in range(2))
        self.assertEqual(len(first), 36)
        self.assertEqual(first, second)


class Agents(unittest.TestCase):
    """A gang under one agent with two GPUs, under two agents that have one each, and, of four, under two that have two each. One rank is killed."""

    def test_a_killed_rank_is_restarted_with_the_same_losses(self):
        with Cluster(nodes=1, start_args=("--num-gpus", "2")) as cluster:
            self.kill_one(cluster, 1, 2)

    def test_two_agents_share_a_host(self):
        with self.two_agents("0", "1") as cluster:
            self.kill_one(cluster, 2, 1)

    @unittest.skipIf(n_gpus() < 4, f"{n_gpus()} GPUs here, four are needed")
    def test_two_agents_with_two_gpus_each(self):
        with self.two_agents("0,1", "2,3") as cluster:
            self.kill_one(cluster, 2, 2)
            self.kill_one(cluster, 2, 2, "by-two-", *TP2)

    @contextlib.contextmanager
    def two_agents(self, *gpus):
        """Each with those of the host's GPUs."""
        with Cluster(nodes=1, env={"CUDA_VISIBLE_DEVICES": gpus[0]}) as cluster:
            cluster.env["CUDA_VISIBLE_DEVICES"] = gpus[1]
            cluster.start_node(1)
            wanted = ",".join(gpus).split(",")
            wait_until(lambda: cluster.total("mobula_gpu") == len(wanted), lambda: str(cluster.status()["nodes"]))

            def shown():
                return sorted(g["device"] for n in cluster.status()["nodes"] for g in n["gpus"])

            wait_until(lambda: shown() == wanted, lambda: str(shown()))
            record("two agents", gpus={n["node_name"]: n["gpus"] for n in cluster.status()["nodes"]})
            print(cluster.mobula("status", "--address", cluster.address).stdout, flush=True)
            yield cluster

    def kill_one(self, cluster, nodes, per_node, prefix="", *more):
        """Submitted twice, the second time the last rank is killed when there is a checkpoint: the same losses."""
        world, logs, took = nodes * per_node, {}, {}
        command = ["mobula", "train", "--num-nodes", str(nodes), "--gpus-per-node", str(per_node), "--max-restarts", "2",
                   "--restart-delay", "50ms", *MODEL, *SHARDED, *MEANWHILE, "--deterministic-mode", "--train-iters", str(LONG),
                   "--save-interval", "100", *more]
        for name in (prefix + "plain", prefix + "killed"):
            where, began = f"{cluster.dir}/{name}", time.monotonic()
            submitted = cluster.mobula("job", "submit", "--address", cluster.address, "--submission-id", name, "--no-wait", "--", *command,
                                       "--checkpoint-url", f"file://{where}")
            self.assertEqual(submitted.returncode, 0, submitted.stdout)
            if name.endswith("killed"):
                wait_until(lambda: os.path.exists(f"{where}/latest_checkpointed_iteration.txt"),
                           lambda: cluster.logs(name), 120)
                os.kill(cluster.rank_pids("mobula-worker")[world - 1], signal.SIGKILL)
            job = cluster.wait_job(name, timeout_s=180)
            logs[name], took[name] = cluster.logs(name), round(time.monotonic() - began, 2)
            self.assertEqual(job["status"], "SUCCEEDED", logs[name])
        plain, killed = (dict((i, loss) for i, _, loss in iterations_of(log)) for log in logs.values())
        self.assertEqual(sorted(plain), list(range(1, LONG + 1)))
        self.assertIn(f"rank {world - 1} was killed by signal 9", logs[prefix + "killed"])
        record(f"killed, {nodes} nodes with {per_node} GPUs each {' '.join(more)}".strip(), seconds=took, last_loss=[plain[LONG], killed[LONG]],
               iterations_with_repeated_ones=len(iterations_of(logs[prefix + "killed"])), same=plain == killed)
        self.assertEqual(plain, killed)


LONG = 1000


if __name__ == "__main__":
    if n_gpus() < 2:
        print(f"left out: {n_gpus()} NVIDIA GPUs here, two are needed")
        sys.exit(77)
    unittest.main(verbosity=2)

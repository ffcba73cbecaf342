"""--ckpt-format torch: a run saves Megatron-LM's own files. megatron-core loads them and computes what we do; a run goes on from
them as from ours, in any layout; a kill or a full disk leaves the one before. Usage: test_megatron_save.py WORKER MOBULA GPT_LOGITS BAD_DISK"""

import itertools
import os
import pathlib
import random
import re
import resource
import sys
import tempfile
import time
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy as np
import torch

import gang
from gang import tool
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER, MOBULA, GPT_LOGITS, BAD_DISK = (os.path.abspath(p) for p in sys.argv[1:5])
del sys.argv[1:5]
TRACKER = "latest_checkpointed_iteration.txt"
TORCH, ZERO = ["--ckpt-format", "torch"], ["--use-distributed-optimizer"]
LLAMA = ["--group-query-attention", "--num-query-groups", 2, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
         "--position-embedding-type", "rope", "--rotary-base", 5000, "--untie-embeddings-and-output-weights", "--kv-channels", 16]
WORDS = ["--distributed-backend", "gloo", "--seq-length", SEQ, "--micro-batch-size", BATCH, "--mock-data", "--tokenizer-type",
         "NullTokenizer", "--vocab-size", VOCAB - 1, "--num-layers", 4, "--hidden-size", 64, "--ffn-hidden-size", 96,
         "--num-attention-heads", 8, "--max-position-embeddings", SEQ, "--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style",
         "cosine", "--lr-warmup-iters", 2, "--train-iters", 8, "--global-batch-size", 8, "--eval-iters", 0, "--log-interval", 1,
         "--save-interval", 4]
ENDLESS = ["--train-iters", 100000, "--save-interval", 100000000]


def layout(tp=1, pp=1, chunks=1):
    return ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp,
            *(["--num-virtual-stages-per-pipeline-rank", chunks] if chunks > 1 else [])]


def files_of(directory):
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def loss_of(line):
    return float(re.search(r"lm loss: (\S+)", line).group(1))


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-save-")
        self.addCleanup(folder.cleanup)
        self.path, self.n = pathlib.Path(folder.name), 0

    def cwd(self):
        self.n += 1
        return str(self.path / f"cwd-{self.n}")

    def run_gang(self, world, *words):
        return gang.run(WORKER, world, [str(w) for w in (*WORDS, *words)], self.cwd())

    def start_gang(self, world, *words):
        g = gang.Gang(WORKER, world, [str(w) for w in (*WORDS, *words)], self.cwd())
        self.addCleanup(g.kill)
        return g.start()

    def tracker(self, name):
        return int((self.path / name / TRACKER).read_text())

    def verified(self, name):
        return tool(MOBULA, "checkpoint", "verify", self.path / name)


class ResumeTest(Case):
    """Every digit of what a run does after its checkpoint of ours is what it does after Megatron-LM's."""

    def check(self, save, *others, kind=(), save_words=()):
        world, words = save
        straight = self.run_gang(world, *words, *kind)
        self.run_gang(world, *words, *kind, "--save", self.path / "ours", "--exit-interval", 4)
        g = self.run_gang(world, *words, *kind, "--save", self.path / "theirs", "--exit-interval", 4, *TORCH, *save_words)
        self.assertRegex(g.ranks[0].log(), r"saving checkpoint at iteration +4 to \S+theirs in torch format\n")
        self.assertNotIn("WARNING: --ckpt-format", g.ranks[0].log())
        self.assertEqual("note: --ckpt-format torch: the optimizer is saved as one without --use-distributed-optimizer"
                         in g.ranks[0].log(), ZERO[0] in words)
        self.assertIn("verified: iteration", self.verified("theirs"))
        for n, (world, words) in enumerate((save, *others)):
            with self.subTest(layout=words, kind=kind):
                want, got = (self.run_gang(world, *words, *kind, "--load", self.path / name) for name in ("ours", "theirs"))
                lines, all_lines = gang.iterations(got.ranks[-1]), gang.iterations(straight.ranks[-1])
                self.assertEqual(sorted(lines), [5, 6, 7, 8])
                self.assertEqual(lines, gang.iterations(want.ranks[-1]))
                self.assertEqual(gang.numbers(got)[8], gang.numbers(want)[8])  # all digits
                if n == 0:
                    self.assertEqual(gang.numbers(got)[8], gang.numbers(straight)[8])
                    self.assertEqual(lines, {i: all_lines[i] for i in lines})
                elif not kind:
                    for i, line in lines.items():
                        self.assertLess(abs(loss_of(line) - loss_of(all_lines[i])), 1e-5 * loss_of(line), i)
        return g

    def test_one_rank(self):
        g = self.check((1, []), (2, ZERO), (4, layout(2, 2)))
        self.assertEqual(files_of(self.path / "theirs"), {TRACKER, "iter_0000004/mp_rank_00/model_optim_rng.pt"})
        self.assertEqual((self.path / "theirs" / TRACKER).read_text(), "4")
        (saved,) = g.ranks[0].of("saved")
        self.assertEqual([f["path"] for f in saved["files"]], ["mp_rank_00/model_optim_rng.pt"])
        size = (self.path / "theirs" / "iter_0000004" / saved["files"][0]["path"]).stat().st_size
        self.assertEqual(saved["files"][0]["size"], size)

    def test_moments_of_all_ranks(self):
        self.check((4, ZERO), (1, []), save_words=["--async-save"])

    def test_ranks_that_share_a_model(self):
        g = self.check((4, [*layout(2, 2), *LLAMA]), (1, LLAMA), (4, [*layout(2), *ZERO, *LLAMA]))
        names = {f"mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt" for t in range(2) for p in range(2)}
        self.assertEqual(files_of(self.path / "theirs"), {TRACKER} | {f"iter_0000004/{n}" for n in names})
        self.assertEqual({f["path"] for f in g.ranks[0].of("saved")[0]["files"]}, names)
        self.assertEqual([r.of("saved")[0]["files"] for r in g.ranks[1:]], [[], [], []])

    def test_stages_and_copies_asynchronously(self):
        self.check((4, [*layout(1, 2), *ZERO]), (2, layout(2)), save_words=["--async-save"])

    def test_interleaved_stages(self):
        """A file has its stage's chunks of layers, model0 and model1."""
        self.check((4, [*layout(1, 2, 2), *ZERO]), (1, []), (2, layout(1, 2)), save_words=["--async-save"])
        for stage in range(2):
            saved = torch.load(self.path / "theirs" / "iter_0000004" / f"mp_rank_00_{stage:03d}" / megatron_gang.NAME,
                               weights_only=False)
            self.assertEqual([k for k in saved if k.startswith("model")], ["model0", "model1"])
            self.assertEqual(saved["args"].virtual_pipeline_model_parallel_size, 2)
        tool(MOBULA, "checkpoint", "convert", "--to", "megatron", "--pipeline-model-parallel-size", 2, self.path / "theirs",
             self.path / "plain")
        saved = torch.load(self.path / "plain" / "iter_0000004" / "mp_rank_00_001" / megatron_gang.NAME, weights_only=False)
        self.assertEqual([k for k in saved if k.startswith("model")], ["model"])
        self.assertIsNone(saved["args"].num_virtual_stages_per_pipeline_rank)

    def test_interleaved_stages_that_share_layers_in_bf16(self):
        self.check((4, ["--bf16", *layout(2, 2, 2), *LLAMA]), (2, ["--bf16", *layout(2), *LLAMA]), kind=())

    def test_bf16(self):
        """The CPU computes in fp32: its weights are in the optimizer's part, whole."""
        self.check((2, ["--bf16", *ZERO]), (2, ["--bf16", *layout(2)]))
        saved = torch.load(self.path / "theirs" / "iter_0000004" / "mp_rank_00" / megatron_gang.NAME, weights_only=False)
        self.assertEqual((saved["args"].params_dtype, saved["args"].bf16), (torch.bfloat16, True))
        self.assertEqual({t.dtype for t in saved["model"].values() if t is not None}, {torch.bfloat16})

    def test_fp16_with_a_dynamic_scale(self):
        """Which overflows before the checkpoint and after it, has its patience and grows."""
        kind = ["--fp16", "--initial-loss-scale", 2**22, "--hysteresis", 2, "--loss-scale-window", 2]
        g = self.check((2, ZERO), (2, layout(2)), kind=kind)
        skipped = [int(n) for n in re.findall(r"number of skipped iterations: +(\d+) ", g.ranks[-1].log())]
        self.assertEqual(len(skipped), 4)
        self.assertIn(sum(skipped), (1, 2, 3))

    def test_without_the_optimizer(self):
        words = ["--save", self.path / "theirs", *TORCH, "--exit-interval", 4]
        self.run_gang(2, *words, "--no-save-optim", "--no-save-rng", "--use-legacy-models")
        saved = torch.load(self.path / "theirs" / "iter_0000004" / "mp_rank_00" / megatron_gang.NAME, weights_only=False)
        self.assertNotIn("optimizer", saved)
        self.assertNotIn("opt_param_scheduler", saved)
        g = self.run_gang(1, "--load", self.path / "theirs", "--no-load-optim", "--exit-interval", 5)
        self.assertEqual(sorted(gang.losses(g)), [5])
        self.assertRegex(g.ranks[0].log(), r"consumed samples: +40 ")


class MegatronTest(Case):
    """The ranks of megatron-core load what a run saved, each its own file, strictly, and give our logits."""

    def check(self, llama, tp, pp, vp=1):
        model = [*(LLAMA if llama else []), "--attention-dropout", 0, "--hidden-dropout", 0]
        words = [*model, "--exit-interval", 4]
        self.run_gang(1, *words, "--save", self.path / "ours")
        world = 2 * tp * pp
        more = [*layout(tp, pp, vp), *ZERO, *TORCH, "--transformer-impl", "local"]
        self.run_gang(world, *words, *more, "--save", self.path / "theirs")
        s = Shape(tp=tp, pp=pp, vp=vp, llama=llama, untied=llama)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
        got = megatron_gang.run(s, self.path, tokens, given="theirs", state="theirs/iter_0000004")
        tokens.numpy().astype("<i4").tofile(self.path / "tokens")
        tool(GPT_LOGITS, self.path / "ours" / "iter_0000004" / "model_tp00_pp00.safetensors", self.path / "tokens",
             self.path / "logits", *WORDS, *model)
        want = torch.from_numpy(np.fromfile(self.path / "logits", "<f4").reshape(BATCH, SEQ, -1))
        self.assertGreater(float(want.abs().max()), 0.3)
        self.assertLess(float((got[..., :VOCAB] - want[..., :VOCAB]).abs().max()), 1e-4)
        args = vars(torch.load(self.path / "theirs" / "iter_0000004" / megatron_gang.file_of(s, tp - 1, pp - 1),
                               weights_only=False)["args"])
        want = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "world_size": world,
                "data_parallel_size": 2, "ckpt_format": "torch", "iteration": 4, "consumed_train_samples": 32,
                "transformer_impl": "local", "virtual_pipeline_model_parallel_size": vp if vp > 1 else None}
        self.assertEqual({k: args.get(k) for k in want}, want)

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check(False, 1, 1)

    def test_gates_and_query_groups_by_tensors_and_stages(self):
        self.check(True, 2, 2)

    def test_interleaved_stages_and_tied_embeddings(self):
        self.check(False, 1, 2, 2)

    def test_interleaved_stages_by_tensors(self):
        self.check(True, 2, 2, 2)


class CrashTest(Case):
    """The tracker names a whole checkpoint, whatever happens to the one that is being saved."""

    def save_now(self, g):
        n = len(g.ranks[0].of("saved"))
        g.ranks[0].tell(t="save_now", text="again")
        g.wait(lambda: all(len(r.of("saved")) > n for r in g.ranks))
        return g.ranks[0].of("saved")[-1]["iteration"]

    def test_killed_at_any_moment(self):
        for more in ([], ["--async-save"]):
            name, saved, rng = "s" + str(len(more)), 0, random.Random(7)
            words = [*ENDLESS, *ZERO, *TORCH, *more, "--save", self.path / name, "--load", self.path / name, "--save-interval", 1]
            for _ in range(4):
                g = self.start_gang(2, *words)
                g.reached(saved + 3)
                time.sleep(rng.uniform(0, 0.05))  # the moment of the kill is the subject of this test
                g.kill()
                if saved:
                    found = re.search(r"successfully loaded checkpoint from \S+ .* at iteration (\d+)", g.ranks[0].log())
                    self.assertEqual(int(found.group(1)), saved)
                self.assertGreater(self.tracker(name), saved)
                saved = self.tracker(name)
                told = [m["iteration"] for r in g.ranks for m in r.of("saved")]
                self.assertLessEqual(max(told, default=0), saved, "a report came before the tracker")
                self.assertIn("verified: iteration", self.verified(name))
            self.run_gang(1, *words, "--exit-interval", saved + 1)
            self.assertEqual([p.name for p in (self.path / name).iterdir() if p.name.startswith(".")], [])

    def test_a_disk_that_is_full(self):
        """The file may not grow as far as it must. The other rank is told, also while it waits to be asked."""
        for more in ([], ["--async-save"]):
            name = "s" + str(len(more))
            g = self.start_gang(2, *ENDLESS, *ZERO, *TORCH, *more, "--save", self.path / name)
            g.reached(2)
            whole = self.save_now(g)
            resource.prlimit(g.ranks[0].process.pid, resource.RLIMIT_FSIZE, (300000, 300000))
            g.ranks[0].tell(t="save_now", text="one too many")
            self.assertEqual(g.finish(), [73, 69])
            self.assertRegex(g.ranks[0].of("failed")[0]["text"],
                             r"checkpoint of iteration \d+: .*mp_rank_00/model_optim_rng.pt.*File too large")
            self.assertRegex(g.ranks[1].of("failed")[0]["text"], "rank 0 (failed|gave up)")
            self.assertEqual(self.tracker(name), whole)
            self.assertEqual({p.name for p in (self.path / name).iterdir()}, {TRACKER, f"iter_{whole:07d}"})
            self.assertIn("verified: iteration", self.verified(name))

    def test_a_lost_rank_ends_a_save(self):
        """While rank 0 writes, which stands still in the middle."""
        for n, (more, lost) in enumerate(itertools.product(([], ["--async-save"]), (0, 1))):
            with self.subTest(more=more, lost=lost):
                hold = gang.Hold(BAD_DISK, self.path / f"pipe-{n}", 0, megatron_gang.NAME)
                words = [*WORDS, *ENDLESS, *ZERO, *TORCH, *more, "--save", self.path / f"s{n}", "--save-interval", 3]
                gang.lose_in_save(self, hold, lost, gang.Gang(WORKER, 2, [str(w) for w in words], self.cwd(),
                                                              env_of_rank=hold.env_of_rank))
                self.assertEqual([p for p in (self.path / f"s{n}").iterdir() if not p.name.startswith(".")], [])

    def test_older_ones_go(self):
        self.run_gang(2, *TORCH, "--save", self.path / "s", "--save-interval", 2, "--keep-last-k", 2)
        self.assertEqual({p.name for p in (self.path / "s").iterdir()}, {TRACKER, "iter_0000006", "iter_0000008"})


class RefusalTest(Case):
    """Named before training: at the first save it would be too late."""

    def refused(self, what, world, *words):
        g = gang.Gang(WORKER, world, [str(w) for w in (*WORDS, *TORCH, "--save", self.path / "s", *words)], self.cwd())
        self.addCleanup(g.kill)
        self.assertEqual(g.finish(), [78] * world)
        self.assertIn(f"--ckpt-format torch: not written with {what}; with --ckpt-format safetensors", g.ranks[0].log())
        self.assertFalse((self.path / "s").exists())

    def test_what_is_not_written(self):
        self.refused("--optimizer sgd without --no-save-optim", 1, "--optimizer", "sgd")
        self.refused("--decoupled-lr without --no-save-optim", 1, "--decoupled-lr", "1e-3")
        self.run_gang(1, *TORCH, "--save", self.path / "s", "--optimizer", "sgd", "--no-save-optim", "--exit-interval", 4)
        self.assertIn("verified: iteration", self.verified("s"))

    def test_what_their_files_cannot_say(self):
        """The writer itself is asked, by every rank: a channel more than it has room for."""
        words = ["--num-layers", 2, "--hidden-size", 8, "--ffn-hidden-size", 8, "--num-attention-heads", 2, "--kv-channels"]
        for world, more in ((1, []), (2, layout(2)), (2, ["--async-save"])):
            with self.subTest(more=more):
                g = self.start_gang(world, *TORCH, "--save", self.path / "s", *words, 65538, *more)
                codes = g.finish()
                self.assertIn(65, codes)
                self.assertLessEqual(set(codes), {65, 69})  # of one that heard of the other's first
                text = next(r for r, code in zip(g.ranks, codes) if code == 65).of("failed")[0]["text"]
                self.assertIn("--ckpt-format torch: argument kv_channels: expected a number from 1 to 65536", text)
                self.assertEqual(list((self.path / "s").iterdir()), [])
                for rank in g.ranks:
                    self.assertEqual(gang.iterations(rank), {})


if __name__ == "__main__":
    unittest.main(verbosity=2)

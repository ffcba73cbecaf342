"""Training on one GPU through the worker: the CPU's losses, its checkpoints both ways, Megatron's line, bad input.
MOBULA_WORKER is the program; runs on a machine with an NVIDIA GPU and needs Python's standard library only."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

from job_lists import FP8, SLURM

WORKER = os.environ["MOBULA_WORKER"]
MODEL = ("--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 "
         "--micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1 "
         "--eval-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
         "--train-iters 12").split()
CPU, GPU, BF16 = ["--distributed-backend", "gloo"], [], ["--bf16"]
LLAMA = ("--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
         "--group-query-attention --num-query-groups 1 --hidden-dropout 0 --attention-dropout 0").split()
FP16 = ["--fp16", "--initial-loss-scale", "1024"]


def run(*args, env=()):
    p = subprocess.run([WORKER, *MODEL, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=240,
                       env={**os.environ, **dict(env)})
    return p.returncode, p.stdout, p.stderr


def losses(out):
    return {int(i): float(x) for i, x in re.findall(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)", out)}


class Train(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-gpu-")
        self.addCleanup(folder.cleanup)
        self.dir = folder.name

    def train(self, *args):
        rc, out, err = run(*args)
        self.assertEqual(rc, 0, out + err)
        return out

    def assert_close(self, got, want, bound):
        self.assertEqual(sorted(got), sorted(want))
        worst = max(abs(got[i] - want[i]) / want[i] for i in want)
        print(f"  losses of {len(want)} iterations: at most {worst:.2e} apart (bound {bound:.0e})")
        self.assertLessEqual(worst, bound)

    def test_losses(self):
        """Dropout is on: it is the same function on both."""
        want = losses(self.train(*CPU))
        self.assertEqual(len(want), 12)
        self.assert_close(losses(self.train(*GPU)), want, 1e-4)
        self.assert_close(losses(self.train(*BF16)), want, 2e-2)
        self.assert_close(losses(self.train(*FP16)), want, 5e-3)
        self.assert_close(losses(self.train(*CPU, *FP16)), want, 5e-3)
        self.assert_close(losses(self.train(*FP16, "--use-distributed-optimizer")), want, 5e-3)

    def test_fp8(self):
        """A hundred iterations beside bf16's, in GPT-2's and in Llama's style; what is computed again changes no bit."""
        for style, more in (("gpt2", []), ("llama", LLAMA)):
            with self.subTest(style):
                args = [*BF16, "--train-iters", "100", *more]
                want = losses(self.train(*args))
                self.assertEqual(len(want), 100)
                self.assertLess(want[100], want[1] - 0.5, "there is something to learn")
                for form, bound in (("hybrid", 1e-2), ("e4m3", 1e-2)):
                    out = self.train(*args, "--fp8-format", form)
                    self.assertRegex(out, r"weights: fp8, for products +")
                    self.assertNotEqual(losses(out), want)
                    self.assert_close(losses(out), want, bound)
                again = self.train(*args, "--fp8-format", "e4m3", "--recompute-granularity", "full", "--recompute-method", "uniform",
                                   "--recompute-num-layers", "1", "--deterministic-mode")
                whole = self.train(*args, "--fp8-format", "e4m3", "--deterministic-mode")
                self.assertEqual(losses(again), losses(whole))

    def test_the_slurm_list_with_fp8(self):
        """Megatron-LM's Llama-3 8B example, its sizes scaled down."""
        own = ["--save", self.dir + "/ckpt", "--load", self.dir + "/ckpt", "--tensorboard-dir", self.dir + "/tb", "--data-cache-path",
               self.dir + "/cache"]
        small = ("--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --kv-channels 32 --vocab-size 1023 "
                 "--seq-length 128 --global-batch-size 8 --train-samples 160 --lr-decay-samples 160 --lr-warmup-samples 16 "
                 "--eval-iters 2").split()
        p = subprocess.run([WORKER, *SLURM.split(), *FP8.split(), *small, *own], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, timeout=240, check=False)
        self.assertEqual(p.returncode, 0, p.stdout)
        self.assertEqual(sorted(losses(p.stdout)), list(range(1, 21)), p.stdout)
        self.assertRegex(p.stdout, r"weights: fp8, for products +")

    def test_fp8_checkpoints(self):
        """Scales are no state: a run that goes on in fp8 prints what the one prints that was not stopped, and any other takes it over."""
        args = [*BF16, "--fp8-format", "hybrid", "--deterministic-mode"]
        want = losses(self.train(*args))
        keep = ["--save", self.dir, "--load", self.dir, "--save-interval", "4"]
        got = losses(self.train(*args, *keep, "--exit-interval", "4"))
        got.update(losses(self.train(*args, *keep, "--exit-interval", "8")))
        self.assertEqual(got, {i: want[i] for i in range(1, 9)})
        self.assert_close(losses(self.train(*CPU, *keep)), {i: want[i] for i in range(9, 13)}, 2e-2)

    def test_fp8_bad_input(self):
        for words, args in ((["--fp8-format hybrid", "8.9 or higher", "gloo"], [*CPU, "--bf16", "--fp8-format", "hybrid"]),
                            (["--fp8-format e4m3 needs --bf16"], ["--fp8-format", "e4m3"])):
            self.assert_refused(78 if "gloo" in words else 64, words, args)
        rc, _, err = run(*BF16, "--fp8-format", "e4m3", "--ffn-hidden-size", "520")
        self.assertNotEqual(rc, 0)
        self.assertIn("FP8 needs multiples of 16: of the MLP's channels there are 520 on a rank", err)

    def test_overflows(self):
        """From 2^32 on, on the GPU as on the CPU: steps are left out until the scale fits, the first overflow is forgiven."""
        for device in (GPU, CPU):
            out = self.train(*device, "--fp16", "--train-iters", "30")
            lines = re.findall(r"(lm loss: \S+ \| )?loss scale: (\S+) \|( grad norm: \S+ \|)? number of skipped iterations: +(\d+) \|",
                               out)
            self.assertEqual(len(lines), 30)
            left_out = [skipped == "1" for *_, skipped in lines]
            print(f"  {left_out.index(False)} iterations left out at the beginning, {sum(left_out)} in all")
            self.assertGreater(left_out.index(False), 3)
            scale, seen = 2.0**32, 0
            for out_of, (loss, told, norm, _) in zip(left_out, lines):
                seen += out_of
                scale = scale / 2 if out_of and seen > 1 else scale
                self.assertEqual((float(told), bool(loss), bool(norm)), (scale, not out_of, not out_of))

    def test_checkpoints_go_both_ways(self):
        """Four iterations on the CPU, four on the GPU, four on the CPU are twelve on the CPU; so with bf16 or fp16 in the middle."""
        want = losses(self.train(*CPU))
        for name, middle, bound in (("fp32", GPU, 1e-4), ("bf16", BF16, 2e-2), ("async", [*GPU, "--async-save"], 1e-4),
                                    ("bf16, async", [*BF16, "--async-save"], 2e-2), ("fp16", FP16, 5e-3),
                                    ("torch", [*GPU, "--ckpt-format", "torch"], 1e-4),
                                    ("bf16, torch, async", [*BF16, "--ckpt-format", "torch", "--async-save"], 2e-2)):
            with self.subTest(name):
                where = os.path.join(self.dir, name)
                keep = ["--save", where, "--load", where, "--save-interval", "4"]
                got = {}
                for device, last in ((CPU, 4), (middle, 8), (CPU, 12)):
                    out = self.train(*device, *keep, "--exit-interval", str(last))
                    self.assertIn(f"successfully saved checkpoint from iteration {last:7d}", out)
                    got.update(losses(out))
                self.assert_close(got, want, bound)

    def test_runs_give_the_same_bits(self):
        args = [*BF16, "--deterministic-mode", "--log-params-norm"]
        first, second = (re.findall(r"lm loss: \S+|grad norm: \S+|params norm: \S+", self.train(*args)) for _ in range(2))
        self.assertEqual(len(first), 36)
        self.assertEqual(first, second)

    def test_graphs(self):
        """Which a run has unless it is told not to, and which change no digit, evaluations between included."""
        args = [*BF16, "--deterministic-mode", "--log-params-norm", "--eval-iters", "2", "--eval-interval", "4"]
        outs = [self.train(*args, *more) for more in ([], ["--cuda-graph-impl", "none"])]
        first, second = (re.findall(r"lm loss.*?: \S+|grad norm: \S+|params norm: \S+", out) for out in outs)
        self.assertGreater(len(first), 36)
        self.assertEqual(first, second)
        self.assertIn(" > CUDA graphs: a pass is captured when it comes the second time\n", outs[0])
        self.assertNotIn("CUDA graphs", outs[1])

    def test_profile(self):
        """The phases of the iterations that are asked for, and of no others, are ranges of a profiler."""
        record = os.path.join(self.dir, "ranges")
        env = {"NVTX_INJECTION64_PATH": os.environ["MOBULA_NVTX_RECORDER"], "MOBULA_NVTX_RECORD": record}
        rc, out, err = run("--profile", "--profile-step-start", "3", "--profile-step-end", "5", env=env)
        self.assertEqual(rc, 0, out + err)
        stack, paths = [], []
        with open(record, encoding="ascii") as lines:
            for line in lines.read().splitlines():
                if line == "end":
                    stack.pop()
                else:
                    stack.append(line.removeprefix("begin "))
                    paths.append("/".join(stack))
        self.assertEqual(stack, [])
        layers = {way: [f"layer {l} {way}" for l in order] for way, order in (("forward", (1, 2)), ("backward", (2, 1)))}
        want = []
        for it in (4, 5):
            want.append(f"iteration {it}")
            for micro in (1, 2):
                want += [f"iteration {it}/{p}" for p in
                         [f"forward {micro}", *(f"forward {micro}/{l}" for l in layers["forward"]),
                          f"backward {micro}", f"backward {micro}/output and loss",
                          *(f"backward {micro}/{l}" for l in layers["backward"])]]
            want += [f"iteration {it}/reduce gradients", f"iteration {it}/optimizer"]
        self.assertEqual(paths, want)
        os.unlink(record)
        rc, out, err = run("--profile", "--profile-ranks", "1", "--profile-step-start", "0", env=env)
        self.assertEqual(rc, 0, out + err)
        self.assertFalse(os.path.exists(record), "nothing was told: NVTX did not even open the recorder")

    def test_line(self):
        out = self.train(*BF16, "--log-throughput")
        self.assertIn("using torch.bfloat16 for parameters ...", out)
        self.assertRegex(out, r"> backend: CUDA, NVIDIA [^,]+, \d+ multiprocessors, [0-9.]+ GiB, cuBLASLt \d+")
        self.assertRegex(out, r"weights: bf16, for products +")
        self.assertRegex(
            out, r" \[[-0-9: ]+\] iteration +12/ +12 \| consumed samples: +96 \| elapsed time per iteration \(ms\): [0-9.]+ \|"
            r" mem usages: [0-9.]+ \| throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \| learning rate: [0-9.E+-]+ \|"
            r" global batch size: +8 \| lm loss: [0-9.E+-]+ \| loss scale: 1.0 \| grad norm: [0-9.]+ \|"
            r" number of skipped iterations: +0 \| number of nan iterations: +0 \|")

    def test_memory_is_the_gpus(self):
        """The logits of a larger vocabulary are more of the GPU's memory, and hardly any of the host's."""
        small, large = (float(re.search(r"mem usages: ([0-9.]+)", self.train(*BF16, *more))[1])
                        for more in ([], ["--vocab-size", "2000000"]))
        print(f"  mem usages {small} and {large}")
        self.assertGreater(small, 0)
        self.assertGreater(large, small + 0.01)

    def assert_refused(self, status, words, args, env=()):
        rc, _, err = run(*args, env=env)
        self.assertEqual(rc, status, err)
        lines = [line for line in err.splitlines() if line]
        print("  " + "\n  ".join(lines))
        self.assertEqual(len(lines), 1, err)
        for word in words:
            self.assertIn(word, lines[0])

    def test_bad_input(self):
        self.assert_refused(78, ["no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES none)"], GPU,
                            [("CUDA_VISIBLE_DEVICES", "none")])
        rc, _, err = run(*BF16, "--micro-batch-size", "1000000", "--global-batch-size", "1000000")
        self.assertNotEqual(rc, 0)
        self.assertRegex(err, r"the memory plan needs \S+ \S+ of device memory, \S+ GiB are available; would fit: --micro-batch-size ")

if __name__ == "__main__":
    if not os.path.exists("/dev/nvidiactl"):
        print("left out: no NVIDIA GPU here")
        sys.exit(77)
    unittest.main(verbosity=2)

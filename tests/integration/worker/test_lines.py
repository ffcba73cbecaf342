"""What a run says beside its iterations: timers in Megatron-LM's three forms, memory, and what the real TensorBoard reads of
it. Usage: test_lines.py WORKER"""

import math
import re
import unittest

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gang import iterations, run
from layouts import LLAMA, NO_DROPOUT, TINY, WORKER, LayoutCase, length, split

LAYERS, HIDDEN, SEQ = 4, 32, 16
STEP = ("forward-backward", "all-grads-sync", "optimizer")
SETUP = ("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")


class Lines(LayoutCase):
    MODEL = ["--num-layers", str(LAYERS), *length(SEQ), *NO_DROPOUT, "--global-batch-size", "8"]

    def last_log(self, world, *extra):
        return self.train(world, *extra).ranks[-1].log()

    def timers(self, log, title, name, value):
        """[[number of each group]] of all lines of that timer."""
        self.assertIn(title, log)
        return [[float(x) for x in m] for m in re.findall(f"^    {re.escape(name)} \\.+: {value}$", log, re.M)]

    def test_timers_of_level_0(self):
        log = self.last_log(2, "--train-iters", "10", "--save", self.path("saved"), "--save-interval", "10")
        for name, n in (("evaluate", 3), ("save-checkpoint", 1), *((name, 1) for name in SETUP)):
            found = self.timers(log, "(min, max) time across ranks (ms):\n", name, r"\((\S+), (\S+)\)")
            self.assertEqual(len(found), n, name)
            for least, most in found:
                self.assertTrue(0 <= least <= most)
        for name in STEP:
            self.assertNotIn(f"{name} ..", log)

    def test_the_largest_alone(self):
        log = self.last_log(2, "--train-iters", "4", "--log-interval", "2", "--timing-log-level", "1", "--timing-log-option",
                            "max")
        for name in STEP:
            self.assertEqual(len(self.timers(log, "max time across ranks (ms):\n", name, r"(\d+)\.(\d\d)")), 2, name)
        self.assertNotIn("(min, max)", log)

    def test_every_rank(self):
        log = self.last_log(2, "--train-iters", "4", "--log-interval", "4", "--timing-log-level", "2", "--timing-log-option",
                            "all")
        found = re.findall(r"^times across ranks \(ms\):\n((?:  .*\n)+)", log, re.M)
        of_step = [block for block in found if "forward-backward" in block]
        self.assertEqual(len(of_step), 1, log)
        self.assertRegex(of_step[0], r"^  forward-backward:\n     rank  0: \d+\.\d\d\n     rank  1: \d+\.\d\d\n"
                                     r"  all-grads-sync:\n     rank  0: ")

    def test_the_line_of_an_iteration(self):
        """Its fields, their order and their widths, which scripts of others cut it by."""
        e = r"\d\.\d{6}E[+-]\d\d"
        start = (r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        3/       3 \| consumed samples:           24 \|"
                 r" elapsed time per iteration \(ms\): \d+\.\d \| mem usages: \d\.\d{4} \|")
        end = r" number of skipped iterations:   0 \| number of nan iterations:   0 \|$"
        few = ["--train-iters", "3", "--eval-iters", "0"]
        log = self.last_log(1, *few)
        self.assertRegex(log, re.compile(
            f"{start} learning rate: {e} \\| global batch size:     8 \\| lm loss: {e} \\| loss scale: 1\\.0 \\|"
            f" grad norm: \\d+\\.\\d{{3}} \\| params norm: \\d+\\.\\d{{3}} \\|{end}", re.M))
        log = self.last_log(1, *few, "--log-throughput", "--log-num-zeros-in-grad", "--decoupled-lr", "1e-4",
                            "--decoupled-min-lr", "1e-5", "--untie-embeddings-and-output-weights")
        self.assertRegex(log, re.compile(
            f"{start} throughput per GPU \\(TFLOP/s/GPU\\): \\d+\\.\\d \\| learning rate: {e} \\| decoupled learning rate: {e} \\|"
            f" global batch size:     8 \\| lm loss: {e} \\| loss scale: 1\\.0 \\| grad norm: \\d+\\.\\d{{3}} \\|"
            f" num zeros: \\d+\\.\\d \\| params norm: \\d+\\.\\d{{3}} \\|{end}", re.M))

    def test_rates_of_a_schedule(self):
        at = TINY.index("--lr-warmup-iters")
        words = TINY[:at] + TINY[at + 2:]
        for more, want in (
            ("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear --lr-warmup-init 1e-4 --lr-warmup-iters 2",
             lambda i: 1e-4 + 9e-4 * i / 2 if i <= 2 else 1e-3 * min(1, 1 - (i - 4) / 4)),
            ("--lr-decay-style linear --lr-warmup-fraction 0.25", lambda i: 1e-3 * (i / 2 if i <= 2 else 1 - (i - 2) / 6)),
        ):
            gang = run(WORKER, 1, [*words, *self.MODEL, "--lr", "1e-3", "--data-path", self.path("to500"),
                                   "--train-iters", "8", *more.split()], self.path(f"rates{len(more)}"))
            rates = {i: float(re.search(r"learning rate: (\S+)", line)[1]) for i, line in iterations(gang.ranks[0]).items()}
            self.assertEqual(sorted(rates), list(range(1, 9)))
            for i, rate in rates.items():
                self.assertAlmostEqual(rate, want(i), delta=1e-9, msg=f"{more}, iteration {i}")

    def memory(self, gang):
        """(estimate's three numbers, {rank: four numbers}), each said once."""
        estimates = re.findall(r"^Theoretical memory footprints: weight and optimizer=(\S+) MB, activation=(\S+) MB, "
                               r"total=(\S+) MB$", gang.ranks[0].log(), re.M)
        self.assertEqual(len(estimates), 1)
        told = {}
        for r, rank in enumerate(gang.ranks):
            lines = re.findall(r"^\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: (\S+) \| "
                               r"max allocated: (\S+) \| reserved: (\S+) \| max reserved: (\S+)$", rank.log(), re.M)
            for number, after, *values in lines:
                self.assertEqual((int(number), after), (r, "1"))
                self.assertNotIn(r, told)
                told[r] = [float(v) for v in values]
        return [float(x) for x in estimates[0]], told

    def test_memory(self):
        words = [*LLAMA, "--train-iters", "3", "--lr-warmup-iters", "0"]
        gang = self.train(1, *words)
        (kept, activations, total), told = self.memory(gang)
        n = int(re.search(r"number of parameters on .*: (\d+)$", gang.ranks[0].log(), re.M).group(1))
        # The estimate has norms with biases.
        self.assertAlmostEqual(kept, 18 * (n + (2 * LAYERS + 1) * HIDDEN) / 2**20, delta=0.006)
        tokens = 2 * SEQ
        want = LAYERS * tokens * (18 * HIDDEN + 4 * 96) + 8 * tokens + tokens * HIDDEN + 4 * tokens * (HIDDEN + 512)
        self.assertAlmostEqual(activations, want / 2**20, delta=0.006)
        self.assertAlmostEqual(total, kept + activations, delta=0.011)
        now, most, *reserved = told[0]
        self.assertEqual([now, most], reserved)
        self.assertTrue(12 * n / 2**20 < now <= most)  # weights, gradients and a moment are some of it

        (sharded, *_), told = self.memory(self.train(4, *words, "--use-distributed-optimizer", *split(tensor=2)))
        self.assertAlmostEqual(sharded, kept / 18 * (6 + 12 / 2) / 2, delta=0.03)
        self.assertEqual(sorted(told), [0, 1])  # data parallel rank 0 of each

    def test_a_step_without_a_learning_rate_says_nothing(self):
        log = self.train(1, "--train-iters", "1", "--lr-warmup-iters", "0", "--lr", "0").ranks[0].log()
        self.assertNotIn("Theoretical", log)

    def test_iterations_that_are_skipped(self):
        skipped, folder = ["--iterations-to-skip", "2", "5"], self.path("skips")
        for world, layout in ((1, []), (2, split(pipeline=2))):
            whole = self.train(world, *skipped, *layout, "--tensorboard-dir", folder)
            logged = iterations(whole.ranks[-1])
            self.assertEqual(sorted(logged), [i for i in range(1, 21) if i not in (3, 6)])
            lines = re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+) \|(?: skipped samples: +(\d+) \|)? elapsed",
                               whole.ranks[-1].log())
            for i, consumed, n in lines:
                self.assertEqual(int(consumed), 8 * int(i))
                self.assertEqual(int(n or 0), 8 * ((int(i) > 3) + (int(i) > 6)))
        self.train(1, *skipped, "--save", self.path("skipped"), "--save-interval", "4", "--exit-interval", "4")
        rest = iterations(self.train(1, *skipped, "--load", self.path("skipped")).ranks[0])
        want = iterations(self.alone(*skipped).ranks[0])
        self.assertEqual(rest, {i: line for i, line in want.items() if i > 4})
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        self.assertEqual({e.step: e.value for e in events.Scalars("skipped-train-samples")},
                         {i: 8 if i < 6 else 16 for i in range(4, 21) if i != 6})

    def test_iterations_that_are_skipped_while_the_batch_grows(self):
        words = [*TINY, *self.MODEL, "--data-path", self.path("to500"), "--lr-warmup-iters", "0", "--train-samples", "240",
                 "--global-batch-size", "16", "--rampup-batch-size", "4", "4", "60", "--iterations-to-skip", "1", "3", "4", "6",
                 "9"]
        want = iterations(run(WORKER, 1, words, self.path("ramp")).ranks[-1])
        self.assertEqual(sorted(want), [1, 3, 6, 8, 9, *range(11, 21)])
        # What is skipped counts: batches are of 4, from 20 samples on of 8, from 40 on of 12.
        self.assertEqual([int(re.search(r"global batch size: +(\d+)", want[i]).group(1)) for i in (1, 3, 6, 8, 9, 11)],
                         [4, 4, 8, 8, 12, 16])
        for at in (3, 6, 8):
            folder = self.path(f"ramp-{at}")
            run(WORKER, 1, [*words, "--save", folder, "--save-interval", str(at), "--exit-interval", str(at)], folder + "-run")
            rest = run(WORKER, 2, [*words, "--load", folder, *split(pipeline=2)], folder + "-rest")
            self.assertEqual(iterations(rest.ranks[-1]), {i: line for i, line in want.items() if i > at})

    def test_tensorboard(self):
        for queue in ("1000", "2"):
            folder = self.path(f"events-{queue}")
            self.train(2, *LLAMA, "--train-iters", "4", "--tensorboard-dir", folder, "--tensorboard-queue-size", queue,
                       "--log-memory-to-tensorboard", "--log-num-zeros-in-grad", "--log-timers-to-tensorboard",
                       "--timing-log-level", "1", "--log-interval", "2")
            events = EventAccumulator(folder, size_guidance={"scalars": 0})
            events.Reload()
            tags = events.Tags()["scalars"]
            for tag in ("num-zeros", "num-zeros vs samples", "mem-reserved-bytes", "mem-allocated-bytes",
                        "mem-allocated-count"):
                self.assertEqual(len(events.Scalars(tag)), 4, tag)
            self.assertGreater(events.Scalars("num-zeros")[0].value, 1000)
            self.assertGreater(events.Scalars("mem-allocated-bytes")[0].value, events.Scalars("mem-allocated-count")[0].value)
            for name in STEP:
                self.assertEqual([e.step for e in events.Scalars(f"{name}-time")], [2, 4])
            self.assertNotIn("evaluate-time", tags)

    def test_every_tag(self):
        folder = self.path("tags")
        self.train(2, "--untie-embeddings-and-output-weights", "--train-iters", "4", "--eval-interval", "4", "--decoupled-lr",
                   "1e-4", "--iterations-to-skip", "2", "--tensorboard-dir", folder, "--log-memory-to-tensorboard",
                   "--log-num-zeros-in-grad", "--log-timers-to-tensorboard", "--timing-log-level", "1", "--log-interval", "2",
                   "--log-throughput", "--log-validation-ppl-to-tensorboard", "--log-world-size-to-tensorboard")
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        with_samples = ("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros",
                        "params-norm", "lm loss validation", "lm loss validation ppl")
        self.assertEqual(set(events.Tags()["scalars"]), {
            *with_samples, *(f"{tag} vs samples" for tag in with_samples), "decoupled-learning-rate", "skipped-train-samples",
            "mem-reserved-bytes", "mem-allocated-bytes", "mem-allocated-count", "iteration-time", "throughput",
            *(f"{name}-time" for name in STEP)})
        self.assertEqual({e.value for e in events.Scalars("world-size")}, {2})
        loss, ppl = (events.Scalars(f"lm loss validation{more}")[-1] for more in ("", " ppl"))
        self.assertAlmostEqual(math.exp(loss.value) / ppl.value, 1, delta=1e-5)
        self.assertEqual((loss.step, events.Scalars("lm loss validation vs samples")[-1].step), (4, 32))

    def test_tensorboard_and_the_log_have_intervals_of_their_own(self):
        """The norm of the weights goes by both."""
        folder = self.path("intervals")
        log = self.train(2, *split(tensor=2), "--train-iters", "12", "--tensorboard-dir", folder, "--log-params-norm",
                         "--log-timers-to-tensorboard", "--tensorboard-log-interval", "3", "--log-interval", "4").ranks[-1].log()
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        for tag in ("params-norm", "grad-norm"):
            self.assertEqual([e.step for e in events.Scalars(tag)], [3, 6, 9, 12], tag)
            self.assertEqual([e.step for e in events.Scalars(f"{tag} vs samples")], [24, 48, 72, 96], tag)
        self.assertEqual([e.step for e in events.Scalars("iteration-time")], [4, 8, 12])
        norms = re.findall(r"iteration +(\d+)/.*params norm: (\S+)", log)
        self.assertEqual([int(i) for i, _ in norms], [4, 8, 12])
        self.assertAlmostEqual(events.Scalars("params-norm")[-1].value, float(norms[-1][1]), delta=0.001)
        self.assertNotEqual(events.Scalars("params-norm")[0].value, events.Scalars("params-norm")[-1].value)


if __name__ == "__main__":
    unittest.main()

"""Arguments by which a run takes more from elsewhere than its command line: the schedule and the layout of a checkpoint, the
words of --data-path from a file. Usage: test_resume_args.py WORKER"""

import json
import re
import unittest

from gang import Gang, iterations, losses, run, unsealed
from layouts import ITERATIONS, LLAMA, WORKER, LayoutCase, length, split

OTHER = "--lr 5e-3 --min-lr 1e-4 --lr-decay-style constant --lr-warmup-iters 1 --weight-decay 0.3".split()


class Resume(LayoutCase):
    MODEL = ["--num-layers", "4", *length(16), "--global-batch-size", "8"]
    STYLE = ["--lr-decay-style", "cosine", "--weight-decay-incr-style", "linear", "--start-weight-decay", "0.01",
             "--end-weight-decay", "0.2"]

    def saved(self, name, *extra, world=1):
        self.train(world, *extra, "--save", self.path(name), "--save-interval", "10", "--exit-interval", "10")
        return ["--load", self.path(name)]

    def test_the_checkpoints_schedule(self):
        load = self.saved("schedule", *self.STYLE)
        want = self.train(1, *self.STYLE)
        got = self.train(1, *OTHER, *load, "--use-checkpoint-opt_param-scheduler", "--save", self.path("later"),
                         "--save-interval", "15", "--exit-interval", "15")
        self.assert_same(got, want, "the checkpoint's schedule", first=11, last=15)
        for i in range(11, 16):  # rates, too
            self.assertEqual(iterations(got.ranks[0])[i], iterations(want.ranks[0])[i])
        for line in (" > using checkpoint value 0.001 for learning rate\n",
                     " > using checkpoint value cosine for learning rate decay style\n",
                     " > using checkpoint value 16 for warmup iterations\n"):
            self.assertIn(line, got.ranks[0].log())
        # What was taken is what is saved: the next one needs no flag.
        with open(self.path("later", "iter_0000015", "state.json"), encoding="utf-8") as f:
            saved = json.load(f)["args"]
        self.assertEqual((saved["lr"], saved["min_lr"], saved["lr_decay_style"], saved["end_weight_decay"]),
                         (1e-3, 0.0, "cosine", 0.2))
        rest = self.train(1, *self.STYLE, "--load", self.path("later"))
        self.assert_same(rest, want, "the checkpoint's schedule, later", first=16)

    def test_the_command_lines_schedule(self):
        load = self.saved("other", *self.STYLE)
        gang = self.gang(1, *OTHER, *load).start()
        self.assertEqual(gang.finish(), [64])
        self.assertIn("OptimizerParamScheduler: class input value 0.005 and checkpoint value 0.001 for learning rate do not "
                      "match", gang.ranks[0].log())
        gang = self.train(1, *OTHER, *load, "--override-opt_param-scheduler")
        self.assertIn(" > overriding learning rate value to 0.005\n", gang.ranks[0].log())
        self.assertIn("learning rate: 5.000000E-03", iterations(gang.ranks[0])[ITERATIONS])
        gang = self.gang(1, *OTHER, *load, "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
        self.assertEqual(gang.finish(), [64])
        self.assertIn("both override and use-checkpoint are set.", gang.ranks[0].log())

    def test_a_length_that_can_be_no_runs(self):
        load = self.saved("length", *self.STYLE)
        state = self.path("length", "iter_0000010", "state.json")
        with open(state, encoding="utf-8") as f:
            told = json.load(f)
        del told["crc64nvme"]
        for name, value in (("train_iters", 2**62), ("train_iters", -5), ("global_batch_size", 2**31)):
            with open(state, "w", encoding="utf-8") as f:
                json.dump({**told, "args": {**told["args"], name: value}}, f)
            gang = self.gang(1, *self.STYLE, *load, "--use-checkpoint-opt_param-scheduler").start()
            self.assertEqual(gang.finish(), [65])
            self.assertIn(f"the checkpoint's argument {name} has the value {value}", gang.ranks[0].log())

    def test_the_checkpoints_layout(self):
        layout = split("--sequence-parallel", tensor=2, pipeline=2, chunks=2)
        model = ["--global-batch-size", "8"]
        load = self.saved("layout", *model, *layout, world=4)
        want = self.train(4, *model, *layout)
        got = self.train(4, *model, "--sequence-parallel", *load, "--use-checkpoint-args",
                         "--use-mp-args-from-checkpoint-args")
        self.assert_same(got, want, "the checkpoint's layout", first=11)
        for line in ("Setting tensor_model_parallel_size to 2 from checkpoint\n",
                     "Setting pipeline_model_parallel_size to 2 from checkpoint\n",
                     "Setting num_virtual_stages_per_pipeline_rank to 2 from checkpoint\n",
                     "tensor-model-parallel size: 2, "):
            self.assertIn(line, got.ranks[0].log())
        alone = self.train(1, *load, "--use-checkpoint-args")  # without it the command line's counts
        self.assertIn("tensor-model-parallel size: 1, ", alone.ranks[0].log())

    def test_sizes_of_weighted_blends(self):
        """Recorded by a save, and kept by the run that goes on; a cyclic order is another one with the others."""
        blend = ["--data-path", "0.3", self.path("to500"), "0.7", self.path("to20"), "--dataloader-type", "cyclic"]
        want = {sizes: self.train(1, *blend, "--blend-sizes", sizes) for sizes in ("0.10", "0.11")}
        self.assertNotEqual(losses(want["0.10"]), losses(want["0.11"]))
        self.assertEqual(losses(self.train(1, *blend)), losses(want["0.11"]))
        for sizes, other, more in (("0.10", "0.11", []), ("0.11", "0.10", ["--ckpt-format", "torch"])):
            load = self.saved(f"blend-{sizes}", *blend, "--blend-sizes", sizes, *more)
            rest = self.train(1, *blend, *load)
            self.assert_same(rest, want[sizes], f"blend of {sizes}", first=11)
            self.assertNotIn("--blend-sizes", rest.ranks[0].log())
            turned = self.train(1, *blend, *load, "--blend-sizes", other)
            self.assertIn(f"WARNING: --blend-sizes {other}: the checkpoint's run had those of core {sizes}: samples come in "
                          "another order", turned.ranks[0].log())
            self.assertNotEqual(losses(turned), losses(rest))
        # One of before there was the argument does not say.
        state = self.path("blend-0.10", "iter_0000010", "state.json")
        with open(state, encoding="utf-8") as f:
            text = unsealed(f.read())
        with open(state, "w", encoding="utf-8") as f:
            f.write(re.sub(r'"blend_sizes": ?"0.10",', "", text))
        load = ["--load", self.path("blend-0.10")]
        log = self.train(1, *blend, *load).ranks[0].log()
        self.assertIn("WARNING: the checkpoint does not say which sizes its run's weighted blend had", log)
        self.assertNotIn("which sizes", self.train(1, *load).ranks[0].log())  # of data without weights

    def test_data_path_from_a_file(self):
        with open(self.path("words"), "w", encoding="utf-8") as f:
            f.write(f"0.3  {self.path('to500')}\n0.7\t{self.path('to20')}\n")
        words = [w for w in self.base() if w not in ("--data-path", self.path("to500"))]
        want = self.train(2, *LLAMA, "--data-path", "0.3", self.path("to500"), "0.7", self.path("to20"))
        got = run(WORKER, 2, [*words, *LLAMA, "--train-iters", str(ITERATIONS), "--data-args-path", self.path("words")],
                  self.path("by-file"))
        self.assert_same(got, want, "data of a file")
        self.assertIn(f"['0.3', '{self.path('to500')}', '0.7', '{self.path('to20')}']", got.ranks[0].log())
        with open(self.path("zero"), "wb") as f:
            f.write(b"0.3 %b\0 0.7 nowhere" % self.path("to500").encode())
        for file, data, status, text in (("words", self.path("to500"), 64, "--data-path and --data-args-path exclude each other"),
                                         ("nowhere", None, 66, "No such file or directory"),
                                         ("zero", None, 64, " is 0: the file is no text")):
            gang = Gang(WORKER, 1, [*words, *(["--data-path", data] if data else []), "--data-args-path", self.path(file)],
                        self.path(f"refused-{file}"))
            self.addCleanup(gang.kill)
            self.assertEqual(gang.finish(), [status])  # before ranks meet
            self.assertIn(f"--data-args-path {self.path(file)}: ", gang.ranks[0].log())
            self.assertIn(text, gang.ranks[0].log())


if __name__ == "__main__":
    unittest.main()

"""The argument lists of the silogen Megatron-LM chart and its overrides start and train 20 iterations, with nothing changed
but paths, sizes and the device, given as more arguments behind them. TensorBoard is the real one. Usage: test_charts.py WORKER"""

import math
import os
import pathlib
import sys
import tempfile
import unittest

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gang import Gang, run, unsealed
from index_file import write_documents
from job_lists import AWS_LLAMA2, AWS_SLURM, CHARTS, EKS, FP8, LLAMA, PRETRAINED, SLURM

os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # what a list of Megatron-LM's would want is said
WORKER = os.path.abspath(sys.argv.pop(1))

SIZES = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 8".split()


def make_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["a gang of ranks trains, saves and resumes", "the chart's own jobs run unchanged"], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}')
    return tokenizer.get_vocab_size()


def make_data(prefix, vocab):
    """2000 documents, so that every share of the default split has some."""
    lengths = np.random.default_rng(5).integers(20, 60, 2000).astype("<i4")
    write_documents(prefix, np.random.default_rng(6).integers(2, vocab, lengths.sum()), lengths)


class ChartsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-charts-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = pathlib.Path(cls.folder.name)
        vocab = make_tokenizer(cls.path / "tokenizer")
        make_data(cls.path / "data", vocab)
        cls.device = ["--distributed-backend", "gloo", "--tokenizer-model", str(cls.path / "tokenizer"), "--seq-length", "32",
                      "--eval-iters", "2"]
        # The base model: iteration 1 without an optimizer, as a converted one.
        run(WORKER, 1, [*LLAMA.split(), *SIZES, "--rotary-base", "500000", "--use-rope-scaling", "--lr", "1e-3",
                        "--tokenizer-type", "HuggingFaceTokenizer", "--mock-data", "--train-iters", "1", "--save",
                        str(cls.path / "basemodel"), "--save-interval", "1", "--no-save-optim", "--micro-batch-size", "2", "--global-batch-size", "8",
                        *cls.device], str(cls.path / "base"))

    def start(self, name, world, *more):
        """What follows the chart's list; directories of this run."""
        folder = self.path / name.replace(" ", "-").replace(",", "")
        pretrained = PRETRAINED in CHARTS[name]
        tensor = "2" if "--sequence-parallel" in CHARTS[name] else "1"  # of 8, as wide as the world here
        args = [*CHARTS[name].split(), *self.device, "--save", str(folder / "checkpoints"), "--tensorboard-dir",
                str(folder / "events"), "--tensor-model-parallel-size", tensor, "--micro-batch-size", "2",
                "--global-batch-size", "8"]
        args += ["--data-cache-path", str(folder / "cache")] if "--data-cache-path" in CHARTS[name] else []
        args += ["--data-path", str(self.path / "data"), "--load", str(self.path / "basemodel")] if pretrained else SIZES
        return folder, pretrained, Gang(WORKER, world, [*args, *more], str(folder))

    def test_all_lists_train(self):
        for name in CHARTS:
            folder, pretrained, gang = self.start(name, 2)
            self.addCleanup(gang.kill)
            self.assertEqual(gang.start().finish(), [0, 0], "\n".join(r.log()[-3000:] for r in gang.ranks))
            told, numbers = gang.ranks[0].log(), gang.ranks[1].log()
            self.assertIn("iteration       20/      20 | consumed samples: ", numbers)
            self.assertRegex(numbers, r"throughput per GPU \(TFLOP/s/GPU\): \d")
            self.assertRegex(told, r"successfully saved checkpoint from iteration +20 to ")
            self.assertIn("validation loss at iteration 20 on test set", numbers)
            self.check_saved(folder, told, 2 if "--sequence-parallel" in CHARTS[name] else 1)
            self.assertIn("note: --bf16: the CPU computes in fp32", told)
            (self.assertIn if "--sequence-parallel" in CHARTS[name] else self.assertNotIn)(
                "note: CUDA_DEVICE_MAX_CONNECTIONS is not 1, ", told)
            # The checkpoint's padded vocabulary, or one that two ranks share. Norms are on both.
            shared = "--sequence-parallel" in CHARTS[name]
            rows = 512 if shared and not pretrained else 384
            n = (125248 - 320 + (rows - 384) * 2 * 64) // (2 if shared else 1) + 320
            self.assertIn(f"number of parameters on (tensor, pipeline) model parallel rank (0, 0): {n}\n", told)
            if pretrained:
                self.assertIn("Setting num_layers to 2 from checkpoint", told)
                self.assertIn("Setting rotary_base to 500000 from checkpoint", told)
                self.assertRegex(told, r"successfully loaded checkpoint from \S+basemodel .* at iteration 1")
                self.assertNotIn("iteration        1/      20", numbers)  # Megatron-LM's own counting
            else:
                self.assertIn("No load directory specified, using provided arguments.\n", told)
            self.check_events(folder / "events", 19 if pretrained else 20, rows)

    def check_saved(self, folder, told, tp):
        """What the chart's users read: DIR/iter_0000020/mp_rank_00/model_optim_rng.pt."""
        self.assertRegex(told, r"saving checkpoint at iteration +20 to \S+ in torch format")
        self.assertNotIn("--ckpt-format", told.replace("--ckpt-format torch ", ""))
        saved = folder / "checkpoints"
        self.assertEqual({str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()},
                         {"latest_checkpointed_iteration.txt",
                          *(f"iter_0000020/mp_rank_{t:02d}/model_optim_rng.pt" for t in range(tp))})

    def check_events(self, folder, n, rows):
        self.assertEqual(len(list(folder.iterdir())), 1)
        events = EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()
        for tag in ("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm"):
            self.assertEqual([e.step for e in events.Scalars(tag)], list(range(21 - n, 21)), tag)
            self.assertEqual(len(events.Scalars(tag + " vs samples")), n)
        self.assertEqual([e.step for e in events.Scalars("lm loss validation")][:2], [10, 20])
        self.assertAlmostEqual(events.Scalars("lm loss")[0].value, math.log(rows), delta=0.3)
        self.assertIn("num_layers/text_summary", tags["tensors"])
        text = events.Tensors("num_layers/text_summary")[0].tensor_proto
        self.assertEqual((text.dtype, text.string_val[0]), (7, b"2"))

    def twenty_steps(self, name, world, words, *more):
        """A list, what is smaller here behind it; rank 0's log and the last rank's."""
        folder = self.path / name
        args = [*words.split(), "--distributed-backend", "gloo", "--seq-length", "32", "--global-batch-size", "8", *more]
        args += ["--train-iters", "20"] if "--train-iters" in words else [
            "--train-samples", "160", "--lr-decay-samples", "160", "--lr-warmup-samples", "16"]
        args += ["--eval-iters", "0" if "--eval-iters 0" in words else "2"]
        for flag in ("--save", "--load", "--tensorboard-dir", "--data-cache-path"):
            if flag in words.split():
                args += [flag, str(folder / ("checkpoints" if flag in ("--save", "--load") else flag.strip("-")))]
        gang = run(WORKER, world, args, str(folder / "run"))
        log = gang.ranks[-1].log()
        self.assertIn("iteration       20/      20 | consumed samples:          160 |", log)
        return gang.ranks[0].log(), log

    def gpt2(self, heads):
        vocab = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula")) + "/gpt2-vocab"
        return ["--vocab-file", vocab + "/vocab.json", "--merge-file", vocab + "/merges.txt", "--data-path", str(self.path / "data"),
                "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", heads]

    def test_the_list_of_eks(self):
        self.twenty_steps("eks", 2, EKS, *self.gpt2("4"), "--tensor-model-parallel-size", "1")

    def test_the_lists_of_aws_under_slurm(self):
        told, log = self.twenty_steps("aws-gpt3", 4, AWS_SLURM, *self.gpt2("4"), "--tensor-model-parallel-size", "2")
        self.assertIn("loss scale: ", log)
        self.assertRegex(told, r"number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): \d")
        llama2 = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula")) + "/tokenizers/llama2/tokenizer.model"
        told, log = self.twenty_steps("aws-llama2", 4, AWS_LLAMA2, "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8",
                                      "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--data-path",
                                      str(self.path / "data"), "--tokenizer-model", llama2)
        self.assertIn("> padded vocab (size: 32000) with 0 dummy tokens (new size: 32000)", told)
        self.assertRegex(log, r"throughput per GPU \(TFLOP/s/GPU\): \d")
        self.assertNotIn("validation loss", log)

    def test_the_list_of_llama3_under_slurm(self):
        small = ["--kv-channels", "8", "--vocab-size", "255", *SIZES]
        _, log = self.twenty_steps("slurm", 2, SLURM, *small)
        self.assertIn("iteration        2/      20", log)
        # The warmup of two iterations has ended: each rate is its own largest.
        self.assertIn("learning rate: 1.500000E-04 | decoupled learning rate: 5.000000E-04 |", log)
        # With its arguments for FP8 it runs on a GPU (tests/gpu/test_train.py); a CPU says so instead of computing something else.
        gang = Gang(WORKER, 1, [*SLURM.split(), *FP8.split(), "--distributed-backend", "gloo", "--seq-length", "32", *small],
                    str(self.path / "fp8"))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.finish(), [78])  # EX_CONFIG
        self.assertIn("--fp8-format hybrid: FP8 needs a GPU of compute capability 8.9 or higher", gang.ranks[0].log())

    def test_a_checkpoint_that_cannot_say(self):
        """Damaged or hostile arguments of a checkpoint end the run with one line, on all ranks."""
        state = self.path / "basemodel" / "iter_0000001" / "state.json"
        whole = state.read_text()
        self.addCleanup(state.write_text, whole)
        for text, old, new in (
                ("the checkpoint's argument num_layers has a wrong type", '"num_layers": 2', '"num_layers": true'),
                ("the checkpoint's argument normalization has the value X", '"RMSNorm"', '"X"'),
                ("num_layers is -7: it must be from 1", '"num_layers": 2', '"num_layers": -7'),
                ("the tokenizer has 300 tokens, the checkpoint 128 rows", '"padded_vocab_size": 384', '"padded_vocab_size": 128')):
            self.assertIn(old, whole)
            state.write_text(unsealed(whole).replace(old, new))
            _, _, gang = self.start("values", 2)
            self.addCleanup(gang.kill)
            codes = gang.start().finish()
            self.assertNotIn(0, codes)
            for rank in gang.ranks:
                self.assertIn(text, rank.of("failed")[0]["text"])


if __name__ == "__main__":
    unittest.main()

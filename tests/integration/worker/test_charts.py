"""The argument lists of the silogen Megatron-LM chart and its overrides start and train 20 iterations, with nothing changed
but paths, sizes and the device, given as more arguments behind them. TensorBoard is the real one. Usage: test_charts.py WORKER"""

import math
import os
import pathlib
import struct
import sys
import tempfile
import unittest

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gang import Gang, run, unsealed

WORKER = os.path.abspath(sys.argv.pop(1))

COMMON = """--lr 1e-5 --min-lr 1e-6 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0
  --pipeline-model-parallel-size 1 --context-parallel-size 1 --seq-length 2048 --train-iters 20
  --no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model /local_resources/tokenizer --save-interval 20 --eval-interval 10 --ckpt-format torch
  --save /local_resources/checkpoints --dataloader-type cyclic --num-workers 8 --log-interval 1 --log-throughput
  --no-save-optim --no-save-rng --eval-iters 10 --tensorboard-dir /local_resources/experiment/ --ckpt-format torch
  --no-gradient-accumulation-fusion --distributed-timeout-minutes 120 --use-distributed-optimizer --overlap-param-gather
  --overlap-grad-reduce --optimizer adam --exit-on-missing-checkpoint --no-load-optim --use-checkpoint-args --no-load-rng"""
PRETRAINED = """--data-path /local_resources/data/fineweb-edu-train_text_document --load /local_resources/basemodel"""
LLAMA = """--untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear --swiglu
  --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --group-query-attention
  --num-query-groups 8 --max-position-embeddings 128000"""
CHARTS = {
    "values": f"{COMMON} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 16 "
              "--use-flash-attn",
    "llama-8b-2x2-4ddp": f"{COMMON} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 2 "
                         "--global-batch-size 16 --use-flash-attn",
    "llama-8b-16ddp, tutorial 03": f"{COMMON} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 11 "
                                   "--global-batch-size 704 --use-flash-attn",
    "llama-70b-2ddp, tutorial 04": f"{COMMON} {PRETRAINED} --tensor-model-parallel-size 8 --sequence-parallel "
                                   "--micro-batch-size 11 --global-batch-size 176 --recompute-activations "
                                   "--data-cache-path /local_resources/data/cache",
    "llama-8b-2x2-4ddp-no-cpt-mock-data": f"{COMMON} {LLAMA} --mock-data --tensor-model-parallel-size 1 "
                                          "--micro-batch-size 3 --global-batch-size 192 --use-flash-attn --num-layers 32 "
                                          "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32",
    "llama-70b-1x8-8tp-no-cpt-mock-data": f"{COMMON} {LLAMA} --mock-data --tensor-model-parallel-size 8 "
                                          "--sequence-parallel --micro-batch-size 3 --global-batch-size 192 "
                                          "--lr-warmup-fraction .001 --adam-beta1 0.9 --adam-beta2 0.95 --use-flash-attn "
                                          "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
                                          "--num-attention-heads 64",
}
# Of the AWS templates (EKS: GPT-3 7.5B, with "=") and of Megatron-LM's Llama-3 8B example under Slurm, but for its FP8.
EKS = """--tensor-model-parallel-size=8 --pipeline-model-parallel-size=1 --num-layers=36 --hidden-size=4096
  --num-attention-heads=32 --seq-length=2048 --max-position-embeddings=2048 --micro-batch-size=1 --global-batch-size=288
  --train-samples=146484375 --lr-decay-samples=126953125 --lr-warmup-samples=183105 --lr=6.0e-05 --min-lr=6.0e-06
  --lr-decay-style=cosine --log-interval=1 --eval-iters=40 --eval-interval=1000 --data-path=/fsx/my-gpt2_text_document
  --vocab-file=/fsx/gpt2-vocab.json --merge-file=/fsx/gpt2-merges.txt --split=98,2,0 --clip-grad=1.0 --weight-decay=0.1
  --adam-beta1=0.9 --adam-beta2=0.95 --init-method-std=0.006 --fp16 --recompute-activations"""
SLURM = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
  --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
  --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
  --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
  --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
  --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
  --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
  --exit-duration-in-mins 235 --tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 1
  --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
  --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path /cache --tiktoken-pattern v2 --split 99,1,0
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
  --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
  --ckpt-format torch_dist --distributed-timeout-minutes 60 --save /ckpt --load /ckpt --tensorboard-dir /tb"""
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
    np.random.default_rng(6).integers(2, vocab, lengths.sum()).astype("<u2").tofile(f"{prefix}.bin")
    offsets = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8")
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1) + lengths.tobytes() +
                offsets.tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes())


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
            self.assertIn("note: --ckpt-format has no effect: checkpoints are safetensors", told)
            self.assertRegex(told, r"(?m)^WARNING: --ckpt-format torch\S*: checkpoints are saved to (\S+) in safetensors format; "
                                   r"Megatron-LM reads what `mobula checkpoint convert --to megatron \1 TARGET` makes of them$")
            self.assertIn("note: --bf16: the CPU computes in fp32", told)
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
                self.assertIn("Checkpoint not found to provide arguments, using provided arguments.", told)
            self.check_events(folder / "events", 19 if pretrained else 20, rows)

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

    def test_lists_of_eks_and_slurm(self):
        samples = "--train-samples 160 --lr-decay-samples 160 --lr-warmup-samples 16 --global-batch-size 8".split()
        vocab = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula")) + "/gpt2-vocab"
        gpt2 = ["--vocab-file", vocab + "/vocab.json", "--merge-file", vocab + "/merges.txt", "--data-path",
                str(self.path / "data"), "--tensor-model-parallel-size", "1", *SIZES[:4], "--num-attention-heads", "4"]
        own = [str(self.path / "slurm"), "--tensorboard-dir", str(self.path / "slurm-events")]
        llama = ["--kv-channels", "8", "--vocab-size", "255", *SIZES, "--save", own[0], "--load", *own]
        common = ["--distributed-backend", "gloo", "--seq-length", "32", "--eval-iters", "2", *samples]
        for name, words, more in (("eks", EKS, gpt2), ("slurm", SLURM, llama)):
            gang = run(WORKER, 2, [*words.split(), *common, *more], str(self.path / ("run-" + name)))
            log = gang.ranks[1].log()
            self.assertIn("iteration       20/      20 | consumed samples:          160 |", log)
            self.assertEqual("decoupled learning rate: " in log, name == "slurm")
        self.assertIn("iteration        2/      20", log)
        # The warmup of two iterations has ended: each rate is its own largest.
        self.assertIn("learning rate: 1.500000E-04 | decoupled learning rate: 5.000000E-04 |", log)

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

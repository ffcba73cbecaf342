"""--use-checkpoint-args beyond the model: tokenizer and format of a checkpoint that the real megatron-core saved, whose
tokenizers are real ones of transformers. Usage: test_checkpoint_args.py WORKER"""

import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import gang
import megatron_gang
from index_file import write_documents
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER = os.path.abspath(sys.argv.pop(1))
ITER = "iter_0000020"
WORDS = [str(w) for w in (
    "--distributed-backend", "gloo", "--micro-batch-size", BATCH, "--global-batch-size", 8, "--lr", "1e-3",
    "--lr-decay-style", "constant", "--eval-iters", 0, "--log-interval", 1, "--use-checkpoint-args",
    "--no-load-optim", "--train-iters", 21)]
FLAG = "--no-use-tokenizer-model-from-checkpoint-args"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]


def make_tokenizer(folder, end="!"):
    """Of all bytes, one of which ends a document."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=end)
    fast.save_pretrained(folder)
    assert len(fast) == VOCAB
    return str(folder)


def documents(seed):
    """Tokens of so many, and their lengths."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(20, 60, 50)
    return draw.integers(0, 90, lengths.sum()), lengths


class CheckpointArgs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="mobula-checkpoint-args-")
        cls.addClassCleanup(folder.cleanup)
        cls.source = pathlib.Path(folder.name)
        megatron_gang.run(Shape(llama=True), cls.source, torch.zeros(BATCH, SEQ, dtype=torch.long))
        make_tokenizer(cls.source / "hf")

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-checkpoint-args-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        shutil.copytree(self.source / "theirs", self.path / "theirs")
        self.hf = shutil.copytree(self.source / "hf", self.path / "hf")

    def saved_with(self, *gone, **args):
        """What Megatron-LM's arguments were, as its own pickle has them; older versions had fewer."""
        for file in (self.path / "theirs" / ITER).rglob(megatron_gang.NAME):
            saved = torch.load(file, weights_only=False)
            vars(saved["args"]).update(args)
            for name in gone:
                delattr(saved["args"], name)
            torch.save(saved, file)

    def train(self, *words, world=1, status=0, **more):
        g = gang.Gang(WORKER, world, [*WORDS, "--load", str(self.path / "theirs"), *map(str, words),
                                        *([] if "--data-path" in words else ["--mock-data"])],
                      str(self.path / "run"), **more)
        self.addCleanup(g.kill)
        g.start()
        self.assertEqual(g.finish(), [status] * world, "\n".join(r.log() for r in g.ranks))
        return "\n".join(r.log() for r in g.ranks)

    def assert_all_in(self, lines, log):
        for line in lines:
            self.assertIn(line, log)

    def test_the_tokenizer_is_the_checkpoints(self):
        self.saved_with(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(self.hf), tiktoken_pattern=None)
        want = [f"Setting tokenizer_model to {self.hf} from checkpoint\n",
                "Setting tokenizer_type to HuggingFaceTokenizer from checkpoint\n",
                "Setting padded_vocab_size to 256 from checkpoint\n",
                "Checkpoint did not provide arguments tiktoken_pattern\n",
                " > padded vocab (size: 256) with 0 dummy tokens (new size: 256)\n"]
        for words in ([], NULL):
            self.assert_all_in(want, self.train(*words))

    def test_the_command_lines_if_asked_for(self):
        self.saved_with(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(self.hf))
        log = self.train(FLAG, *NULL)
        self.assertIn(" > padded vocab (size: 100) with 156 dummy tokens (new size: 256)\n", log)
        self.assertNotIn("tokenizer_model to", log)
        self.assertNotIn("note: --no-use-tokenizer-model", log)

    def test_one_that_is_not_there(self):
        """The command line's with a note; without one an error names the path, and nothing is trained."""
        self.saved_with(tokenizer_type="Llama2Tokenizer", tokenizer_model="/no/such/tokenizer")
        what = "the checkpoint's tokenizer, tokenizer_model /no/such/tokenizer, is not readable here: No such file or directory"
        log = self.train(*NULL)
        self.assertIn(f"note: {what} (rank 0); the command line's is used\n", log)
        self.assertIn(" > padded vocab (size: 100) ", log)
        log = self.train(status=66)
        self.assertIn(f"--use-checkpoint-args: {what} (rank 0); give --tokenizer-type and --tokenizer-model", log)

    def test_one_that_some_rank_lacks(self):
        """One rank without it decides for all: their tokenizers are the same."""
        self.saved_with(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="tok")
        homes = [self.path / f"node{i}" for i in range(2)]
        for home in homes:
            home.mkdir()
        shutil.copytree(self.hf, homes[0] / "tok")
        here = {"world": 2, "home_of_rank": lambda rank: str(homes[rank])}
        self.assert_all_in(["tokenizer_model tok, is not readable here: No such file or directory (rank 1); the command line's",
                            " > padded vocab (size: 100) "], self.train(*NULL, **here))
        self.assertIn("(rank 1); give --tokenizer-type", self.train(status=66, **here))
        shutil.copytree(self.hf, homes[1] / "tok")
        self.assertIn(" > padded vocab (size: 256) ", self.train(*NULL, **here))

    def test_nodes_with_different_tokenizers(self):
        """At one relative path."""
        self.saved_with(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="tok")
        homes = [self.path / f"node{i}" for i in range(2)]
        for home in homes:
            shutil.copytree(self.hf, home / "tok")
        here = {"world": 2, "home_of_rank": lambda rank: str(homes[rank])}
        self.train("--tensor-model-parallel-size", 2, **here)
        make_tokenizer(homes[1] / "tok", end="?")
        for words in ([], ["--tensor-model-parallel-size", 2]):
            log = self.train(*words, status=64, **here)
            self.assertEqual(log.count("ranks have different tokenizers: that of rank 1 has 30 as its end of a document, that of rank 0 0 "
                                       "(1 of 2 ranks differ)\n"), 1)
            self.assertNotIn("lm loss", log)

    def test_a_type_without_its_files_is_told(self):
        self.saved_with(tokenizer_type="GPT2BPETokenizer", tokenizer_model=None)
        log = self.train(*NULL, status=64)
        self.assertIn(f"the checkpoint's tokenizer (the command line's is used with {FLAG}): ", log)
        self.assertIn("--vocab-file", log)

    def test_the_format_is_the_checkpoints(self):
        self.saved_with(ckpt_format="torch")
        save = ["--save", self.path / "saved", "--save-interval", 1, "--no-save-optim", *NULL]
        log = self.train(*save)
        self.assert_all_in(["Setting ckpt_format to torch from checkpoint\n", "in torch format\n"], log)
        self.assertTrue((self.path / "saved" / "iter_0000021" / "mp_rank_00" / megatron_gang.NAME).exists())
        log = self.train(*save, "--ckpt-format", "safetensors")
        self.assertNotIn("Setting ckpt_format", log)
        self.assertIn("in safetensors format\n", log)

    def test_a_model_that_the_command_line_has_too(self):
        """Of GPT-2's form, with add_qkv_bias as Megatron-LM's validate_args() leaves it."""
        shutil.rmtree(self.path / "theirs")
        megatron_gang.run(Shape(), self.path, torch.zeros(BATCH, SEQ, dtype=torch.long))
        words = [w for w in WORDS if w != "--use-checkpoint-args"]
        log = gang.tool(WORKER, *words, *NULL, "--mock-data", "--load", self.path / "theirs", "--num-layers", 4, "--hidden-size", 64,
                        "--ffn-hidden-size", 96, "--num-attention-heads", 8, "--seq-length", SEQ, "--max-position-embeddings", SEQ,
                        "--make-vocab-size-divisible-by", VOCAB)
        self.assertRegex(log, r"iteration +21/ +21 \|")

    def test_sizes_of_weighted_blends(self):
        """Those of the version that wrote the checkpoint, by what only its arguments have."""
        for i in range(2):
            write_documents(str(self.path / f"data{i}"), *documents(i))
        data = ["--data-path", "0.3", self.path / "data0", "0.7", self.path / "data1", "--split", "100,0,0",
                "--dataloader-type", "cyclic", *NULL]
        self.saved_with(renormalize_blend_weights=False, ckpt_format="torch")
        old = self.train(*data)
        self.assertIn("note: the weighted blend has the sizes of Megatron-LM core 0.10, as the checkpoint's run had them\n", old)
        self.saved_with("renormalize_blend_weights")
        new = self.train(*data)
        self.assertNotIn("sizes of Megatron-LM", new)
        forced = self.train(*data, "--blend-sizes", "0.10")
        self.assertIn("WARNING: --blend-sizes 0.10: the checkpoint's run had those of core 0.11", forced)
        loss = [re.search(r"iteration +21/.* lm loss: (\S+)", log).group(1) for log in (old, new, forced)]
        self.assertEqual(loss[0], loss[2])
        self.assertNotEqual(loss[0], loss[1])
        self.saved_with("ckpt_format")  # of core 0.8
        self.assertIn("note: the weighted blend has the sizes of Megatron-LM core 0.10", self.train(*data))

    def test_nothing_is_named_to_load(self):
        """As the chart's lists come without a base model: the command line's arguments, or what they lack."""
        log = gang.tool(WORKER, *WORDS, *NULL, "--mock-data", status=2)
        self.assertEqual(log, "No load directory specified, using provided arguments.\n"
                              "mobula-worker: num_layers argument is None\n")

    def test_a_checkpoint_of_an_older_version(self):
        """What it does not say is said, and the command line's; the oldest called two flags otherwise."""
        self.saved_with("tokenizer_type", "rotary_interleaved", "position_embedding_type", "add_bias_linear", "add_qkv_bias",
                        disable_bias_linear=True, use_rotary_position_embeddings=True)
        log = self.train(*NULL)
        self.assert_all_in([f"Checkpoint did not provide arguments {name}\n" for name in (
            "tokenizer_model", "tokenizer_type", "tiktoken_pattern", "ckpt_format", "add_qkv_bias")], log)
        self.assert_all_in(["Setting use_rotary_position_embeddings to True from checkpoint\n",
                            "Setting position_embedding_type to rope from checkpoint\n",
                            "Setting add_bias_linear to False from checkpoint\n",
                            "successfully loaded checkpoint"], log)


if __name__ == "__main__":
    unittest.main()

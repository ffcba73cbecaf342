"""Against the real transformers: its Llama and GPT-2 directories become checkpoints that give its logits, and come
back as they were; a step of training is torch's. Usage: test_hf.py WORKER MOBULA GPT_LOGITS"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gang import tool as run, unsealed
from index_file import write_tokens

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
WORKER, MOBULA, GPT_LOGITS = (os.path.abspath(p) for p in sys.argv[1:4])
del sys.argv[1:4]
SEQ, BATCH = 16, 2
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def llama(**more):
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
             "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more}))


def gpt2(**more):
    sizes = {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **more}))


MODELS = {
    "llama": lambda: llama(),
    "llama 3.1": lambda: llama(rope_parameters=LLAMA3, head_dim=32, rms_norm_eps=1e-5),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama, tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1,
                                 rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "gpt2": lambda: gpt2(),
    "gpt2, gelu": lambda: gpt2(activation_function="gelu", n_inner=80, tie_word_embeddings=False),
}


def arguments(checkpoint):
    """The arguments of a checkpoint, as a command line."""
    args = json.loads((checkpoint / "iter_0000001" / "state.json").read_text())["args"]
    words = {"bias_gelu_fusion": "--no-bias-gelu-fusion", "add_bias_linear": "--disable-bias-linear"}
    line = []
    for name, value in args.items():
        if name in words:
            line += [] if value else [words[name]]
        elif name not in ("padded_vocab_size", "true_vocab_size") and value is not None and value is not False:
            line += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return line


class HuggingFaceTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-hf-")
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)
        torch.manual_seed(7)

    def make(self, name, **more):
        """A model whose every tensor matters, in a directory of several files."""
        model = MODELS[name]() if isinstance(name, str) else name(**more)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        model.eval()
        model.save_pretrained(self.path / "theirs", max_shard_size="60KB")
        return model

    def logits(self, checkpoint, tokens):
        tokens.numpy().astype("<i4").tofile(self.path / "tokens")
        run(GPT_LOGITS, checkpoint / "iter_0000001" / "model_tp00_pp00.safetensors", self.path / "tokens",
            self.path / "logits", *arguments(checkpoint), "--distributed-backend", "gloo", "--seq-length", SEQ,
            "--micro-batch-size", BATCH, "--train-iters", 1, "--lr", 1, "--mock-data", "--tokenizer-type",
            "NullTokenizer", "--vocab-size", 199)
        return torch.from_numpy(np.fromfile(self.path / "logits", "<f4").reshape(BATCH, SEQ, -1))

    def test_logits_both_ways(self):
        for name in MODELS:
            with self.subTest(name):
                model, tokens = self.make(name), torch.randint(0, 200, (BATCH, SEQ))
                run(MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "ours")
                got = self.logits(self.path / "ours", tokens)
                self.assertEqual(got.shape[2], 256)  # the vocabulary is padded with zeros
                self.assertEqual(float(got[:, :, 200:].abs().max()), 0)
                with torch.no_grad():
                    want = model(tokens).logits
                self.assertGreater(float(want.abs().max()), 0.5)
                self.assertLess(float((got[:, :, :200] - want).abs().max()), 1e-4)

                run(MOBULA, "checkpoint", "convert", "--max-shard-size", 50000, self.path / "ours", self.path / "back")
                self.assertTrue((self.path / "back" / "model.safetensors.index.json").exists())
                again, info = AutoModelForCausalLM.from_pretrained(self.path / "back", output_loading_info=True)
                for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                    self.assertFalse(info[trouble], trouble)
                self.assertIs(type(again), type(model))
                for key, value in model.state_dict().items():
                    self.assertTrue(torch.equal(value, again.state_dict()[key]), key)
                with torch.no_grad():
                    self.assertTrue(torch.equal(again.eval()(tokens).logits, want))
                for used in ("theirs", "ours", "back"):
                    run("rm", "-r", self.path / used)

    def test_numbers_are_rounded_as_torch_does(self):
        model = self.make("llama")
        run(MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "ours")
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            half, ours = self.path / word, self.path / (word + "-ours")
            run(MOBULA, "checkpoint", "convert", "--dtype", word, self.path / "ours", half)
            again = AutoModelForCausalLM.from_pretrained(half, dtype="auto")
            for key, value in model.state_dict().items():
                self.assertTrue(torch.equal(value.to(dtype), again.state_dict()[key]), key)
            run(MOBULA, "checkpoint", "convert", half, ours)
            run(MOBULA, "checkpoint", "convert", ours, self.path / (word + "-wide"))
            wide = AutoModelForCausalLM.from_pretrained(self.path / (word + "-wide"))
            for key, value in model.state_dict().items():
                self.assertTrue(torch.equal(value.to(dtype).float(), wide.state_dict()[key]), key)

    def torch_step(self, model, tokens):
        groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
                  {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item(), norm.item()

    def test_training_is_torchs(self):
        """A step on all samples of the data: their order does not matter."""
        for make, more in ((llama, {"rope_parameters": LLAMA3}), (gpt2, {})):
            model = self.make(make, vocab_size=256, **more)
            run(MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "ours")
            tokens = torch.randint(0, 255, (8 * SEQ + 1,))
            write_tokens(self.path / "data", tokens.numpy())
            log = run(WORKER, *arguments(self.path / "ours"), "--distributed-backend", "gloo", "--seq-length", SEQ,
                      "--micro-batch-size", 2, "--global-batch-size", 8, "--train-iters", 1, "--lr", "1e-2",
                      "--lr-decay-style", "constant", "--weight-decay", "0.1", "--adam-beta2", "0.95", "--adam-eps",
                      "1e-4", "--clip-grad", "1", "--eval-iters", 0, "--log-interval", 1, "--tokenizer-type",
                      "NullTokenizer", "--vocab-size", 255, "--data-path", self.path / "data", "--split", "100,0,0",
                      "--dataloader-type", "cyclic", "--pretrained-checkpoint", self.path / "ours", "--save",
                      self.path / "trained", "--save-interval", 1)
            samples = torch.stack([tokens[i * SEQ:i * SEQ + SEQ + 1] for i in range(8)])
            loss, norm = self.torch_step(model, samples)
            line = next(line for line in log.splitlines() if "lm loss:" in line)
            self.assertLess(abs(float(line.split("lm loss: ")[1].split()[0]) - loss), 1e-5)
            self.assertLess(abs(float(line.split("grad norm: ")[1].split()[0]) - norm), 1e-3)
            run(MOBULA, "checkpoint", "convert", self.path / "trained", self.path / "back")
            again = AutoModelForCausalLM.from_pretrained(self.path / "back")
            for key, value in model.state_dict().items():
                self.assertLess(float((value - again.state_dict()[key]).abs().max()), 1e-4, key)
            for used in ("theirs", "ours", "trained", "back"):
                run("rm", "-r", self.path / used)

    def refused(self, text, *words, status=None):
        done = subprocess.run([MOBULA, "checkpoint", *map(str, words)], capture_output=True, text=True, timeout=60,
                              check=False)
        self.assertIn(text, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertNotEqual(done.returncode, 0)
        if status is not None:
            self.assertEqual(done.returncode, status)

    def change(self, **fields):
        config = self.path / "theirs" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))

    def test_what_is_wrong_is_named(self):
        self.make("llama")
        theirs, target = self.path / "theirs", self.path / "ours"
        good = (theirs / "config.json").read_text()
        for text, fields in {
                'field "model_type": "mistral" is not provided': {"model_type": "mistral"},
                'field "hidden_act": only "silu" is provided': {"hidden_act": "gelu"},
                'field "num_hidden_layers": expected a number from 1 on': {"num_hidden_layers": -1},
                "the number of layers is 99999999": {"num_hidden_layers": 99999999},
                "heads are no multiple of": {"num_key_value_heads": 3},
                'field "rope_scaling": only "linear" and "llama3"': {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
                'of "llama3" only low_freq_factor 1': {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}},
                'field "rope_type": it is missing, but there is a "factor"': {"rope_parameters": {"factor": 4.0}},
                'field "rope_type": expected a text': {"rope_parameters": {"rope_type": 3, "factor": 4.0}},
                'field "rope_parameters": expected an object': {"rope_parameters": "linear"},
                'field "rope_scaling": expected an object': {"rope_scaling": [4.0]},
                'field "rope_scaling": it says something else than "rope_parameters"':
                    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": LLAMA3},
                "60000 layers, but only ": {"num_hidden_layers": 60000},
                'field "mlp_bias": it must be as attention_bias': {"mlp_bias": True},
                "tensor model.layers.2.input_layernorm.weight is missing": {"num_hidden_layers": 3},
                "is none of this model: it would be lost": {"num_hidden_layers": 1},
                "tensor model.embed_tokens.weight: 2 dimensions [200, 64], the configuration needs 2 [201, 64]":
                    {"vocab_size": 201}}.items():
            self.change(**fields)
            self.refused(text, "convert", theirs, target)
            self.refused(text, "inspect", theirs)
            (theirs / "config.json").write_text(good)
        index = theirs / "model.safetensors.index.json"
        listed = index.read_text()
        for text, content in {
                "expected a file of this directory": listed.replace("model-00001", "../model-00001"),
                "not valid JSON": listed[:-20],
                "model-00099": listed.replace("model-00001", "model-00099")}.items():
            index.write_text(content)
            self.refused(text, "convert", theirs, target)
        index.write_text(listed)
        shard = next(theirs.glob("model-00002-*.safetensors"))
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-100])
        self.refused("truncated", "convert", theirs, target, status=65)
        shard.write_bytes(whole)
        self.assertFalse(target.exists() or list(self.path.glob("*.mobula-convert")))

        run(MOBULA, "checkpoint", "convert", theirs, target)
        before = sorted((p, p.stat().st_mtime_ns) for p in target.rglob("*"))
        self.refused("is not empty: nothing is overwritten", "convert", theirs, target)
        self.assertEqual(sorted((p, p.stat().st_mtime_ns) for p in target.rglob("*")), before)
        state = target / "iter_0000001" / "state.json"
        for text, old, new in (("with --apply-layernorm-1p", '"apply_layernorm_1p": false', '"apply_layernorm_1p": true'),
                               ("no --position-embedding-type rope", '"rope"', '"none"'),
                               ("with --rotary-percent", '"rotary_percent": 1.0', '"rotary_percent": 0.5')):
            text_before = state.read_text()
            self.assertIn(old, text_before)
            state.write_text(unsealed(text_before).replace(old, new))
            self.refused(text, "convert", target, self.path / "back")
            state.write_text(text_before)
        self.refused("neither config.json nor latest_checkpointed_iteration.txt", "inspect", self.path)
        odd = self.path / os.fsdecode(b"\xff")
        os.symlink(theirs, odd)
        for words in ("inspect", "--json", odd), ("convert", "--json", odd, self.path / "odd"):
            self.refused("--json cannot say a name that is no UTF-8", *words)
        self.assertFalse((self.path / "odd").exists())
        (self.path / "pipe").mkdir()
        os.mkfifo(self.path / "pipe" / "config.json")
        self.refused("a pipe that nobody writes to", "inspect", self.path / "pipe")
        facts = json.loads(run(MOBULA, "checkpoint", "inspect", "--json", theirs))
        self.assertEqual(facts["parameters"], sum(p.numel() for p in LlamaForCausalLM.from_pretrained(theirs).parameters()))
        self.assertEqual(facts["model"], "LlamaForCausalLM")

    def test_options_of_the_other_way_are_refused(self):
        self.make("llama")
        theirs, ours, target = self.path / "theirs", self.path / "ours", self.path / "target"
        run(MOBULA, "checkpoint", "convert", theirs, ours)
        for option, value in (("--dtype", "bf16"), ("--max-shard-size", 1000), ("--vocab-size", 200), ("--iteration", 1)):
            self.refused(option + ": " + str(theirs), "convert", option, value, theirs, target)
        self.refused("--make-vocab-size-divisible-by: " + str(ours), "convert", "--make-vocab-size-divisible-by", 8, ours,
                     target)
        self.refused("the padded vocabulary is 2147483647", "convert", "--make-vocab-size-divisible-by", 2**31 - 1, theirs,
                     target)
        self.assertEqual(sorted(p.name for p in self.path.iterdir()), ["ours", "theirs"])

    def test_what_has_no_room_is_refused(self):
        model = llama()
        for value, word, text in ((65520.0, "fp16", "has values beyond 65504; use --dtype bf16"),
                                  (3.4e38, "bf16", "has values beyond those of bf16; use --dtype fp32")):
            with torch.no_grad():
                model.model.norm.weight[3] = value
            model.save_pretrained(self.path / "theirs")
            run(MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "ours")
            self.refused("tensor model.norm.weight " + text, "convert", "--dtype", word, self.path / "ours",
                         self.path / "half")
            self.assertFalse((self.path / "half").exists())
            run("rm", "-r", self.path / "ours")

    def test_only_a_conversions_rest_is_removed(self):
        self.make("llama")
        theirs, target = self.path / "theirs", self.path / "a"
        partial = self.path / "a.mobula-convert"
        theirs.rename(partial)
        self.refused("would be overwritten while it is read", "convert", partial, target)
        self.refused("is no conversion's: nothing is overwritten", "convert", self.copy(partial, theirs), target)
        self.assertTrue((partial / "config.json").exists())
        (partial / ".mobula-convert").touch()
        run(MOBULA, "checkpoint", "convert", theirs, target)
        self.assertFalse(partial.exists())
        self.assertEqual(sorted(p.name for p in target.iterdir()), ["iter_0000001", "latest_checkpointed_iteration.txt"])

    def copy(self, source, target):
        run("cp", "-r", source, target)
        return target


if __name__ == "__main__":
    unittest.main()

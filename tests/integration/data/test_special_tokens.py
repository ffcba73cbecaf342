"""HuggingFaceTokenizer with and without --tokenizer-hf-no-include-special-tokens: `mobula preprocess` against Megatron-LM's
class around transformers' AutoTokenizer, and against AutoTokenizer itself.

Usage: test_special_tokens.py MOBULA     with the Python of torch-python
"""

import json
import os
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy  # noqa: E402
import transformers  # noqa: E402
from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer  # noqa: E402

import hf_files  # noqa: E402

CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
LLAMA3 = CACHE + "/tokenizers/llama3"
BOS, EOS = ("<|begin_of_text|>", 128000), ("<|end_of_text|>", 128001)
TEXTS = ["A text.", "", " leading and trailing ", "<|begin_of_text|>given<|end_of_text|>", "été 漢字 🙂\n\n", "1234567",
         "a<|eot_id|> b", "<|begin_of_text|>", "x" * 3000]
FLAG = "--tokenizer-hf-no-include-special-tokens"


def read(name):
    with open(f"{LLAMA3}/{name}.json", encoding="utf-8") as f:
        return json.load(f)


def preprocess(program, folder, *flags):
    """The tokens of each text, without eod; none for a text that has none."""
    with open("in.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t}) + "\n" for t in TEXTS)
    done = subprocess.run([program, "preprocess", "--input", "in.jsonl", "--output-prefix", "out", "--no-resume",
                           "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, *flags],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return numpy.fromfile("out_text_document.bin", numpy.int32).tolist()


def check(program, folder, before, after):
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    for flags, include in (([], True), ([FLAG], False)):
        peer = HuggingFaceTokenizer(folder, use_fast=True, include_special_tokens=include)
        want = [peer.text_to_ids(t) for t in TEXTS]
        assert want == [auto(t, add_special_tokens=include).input_ids for t in TEXTS], (folder, flags)
        assert (want[0][:before] == [BOS[1]] * before) == (include or before == 0), want[0]
        assert want[1] == ([BOS[1]] * before + [EOS[1]] * after if include else []), want[1]
        ours = preprocess(program, folder, *flags)
        assert ours == sum(want, []), (folder, flags, ours[:8], want[:2])
    print(f"{os.path.basename(folder)}: {len(TEXTS)} texts equal with and without special tokens")


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="mb-special-") as folder:
        os.chdir(folder)
        config = read("tokenizer_config")
        for name, before, after in (("none", [], []), ("bos", [BOS], []), ("both", [BOS], [EOS])):
            tokenizer = read("tokenizer")
            if before:
                tokenizer["post_processor"] = hf_files.template(before, after)
            hf_files.write(f"{folder}/{name}", tokenizer, tokenizer_config=config)
            check(program, f"{folder}/{name}", len(before), len(after))
        os.chdir("/")


main()

"""Wrong command lines and files: one clear line, a non-zero status, nothing left. Usage: test_bad_input.py WORKER"""

import os
import subprocess
import sys
import tempfile

from gang import MOCK, MODEL

WORKER = os.path.abspath(sys.argv[1])
GOOD = [*MODEL, *MOCK, "--train-iters", "4"]


def without(args, *names):
    out, skip = [], False
    for a in args:
        if a.startswith("--"):
            skip = a in names
        if not skip:
            out.append(a)
    return out


def write_dataset(prefix, lengths, vocab=50):
    """A Megatron .bin/.idx of u16 tokens."""
    with open(prefix + ".bin", "wb") as f:
        for n in lengths:
            f.write(b"".join(int(i % vocab).to_bytes(2, "little") for i in range(n)))
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]))
        f.write(len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little"))
        f.write(b"".join(n.to_bytes(4, "little") for n in lengths))
        at = 0
        for n in lengths:
            f.write(at.to_bytes(8, "little"))
            at += 2 * n
        f.write(b"".join(i.to_bytes(8, "little") for i in range(len(lengths) + 1)))


def main():
    folder = tempfile.TemporaryDirectory(prefix="mobula-bad-")
    os.chdir(folder.name)
    write_dataset("few", [100, 100, 100])
    write_dataset("big", [100] * 200, vocab=100)
    write_dataset("cut", [100] * 200)
    with open("cut.bin", "r+b") as f:
        f.truncate(1000)
    with open("not.idx", "wb") as f, open("not.bin", "wb"):
        f.write(b"something else")
    os.mkfifo("pipe.idx")
    os.mkfifo("pipe.bin")
    on = lambda *paths: [*without(GOOD, "--mock-data"), "--data-path", *paths]

    cases = [
        # name, arguments, status, words of the line
        ("heads do not divide", [*GOOD, "--num-attention-heads", "5"], 64, ["64", "5"]),
        ("global batch not divisible", [*GOOD, "--global-batch-size", "7"], 64, ["global batch size (7)"]),
        ("iterations and samples", [*GOOD, "--train-samples", "80"], 64, ["--train-samples"]),
        ("neither", without(GOOD, "--train-iters"), 64, ["train-iters or train-samples"]),
        ("no layers", without(GOOD, "--num-layers"), 2, ["num_layers argument is None"]),
        ("no data", without(GOOD, "--mock-data"), 64, ["--data-path"]),
        ("two data sources", [*GOOD, "--data-path", "few"], 64, ["single data source"]),
        ("unknown argument", [*GOOD, "--num-layer", "2"], 2,
         ["error: unrecognized arguments: --num-layer 2", "--num-layers"]),
        ("no number", [*GOOD, "--lr", "fast"], 2, ["error: argument --lr: invalid float value: 'fast'"]),
        ("no value", [*GOOD, "--lr"], 2, ["error: argument --lr: expected one argument"]),
        ("no choice", [*GOOD, "--lr-decay-style", "sine"], 2, ["'sine'", "cosine"]),
        ("bf16 sums that are to be fp32", [*GOOD, "--bf16", "--grad-reduce-in-bf16",
                                           "--accumulate-allreduce-grads-in-fp32"], 64, ["exclude"]),
        ("no format of ours", [*GOOD, "--ckpt-format", "zarr"], 78, ["--ckpt-format zarr", "torch_dist"]),
        ("refused", [*GOOD, "--squared-relu"], 78, ["--squared-relu", "not provided"]),
        ("CUDA", without(GOOD, "--distributed-backend"), 78, ["nccl", "gloo"]),
        ("missing vocabulary", [*without(GOOD, "--tokenizer-type", "--vocab-size"), "--vocab-file", "v.json",
                                "--merge-file", "m.txt"], 66, ["v.json"]),
        ("vocabulary not given", without(GOOD, "--tokenizer-type", "--vocab-size"), 64, ["--vocab-file"]),
        ("missing data", on("nowhere"), 66, ["nowhere"]),
        ("empty split", on("few"), 64, ["valid", "--split"]),
        ("truncated .bin", on("cut"), 65, ["cut"]),
        ("no .idx", on("not"), 65, ["not.idx"]),
        ("a pipe for an .idx", on("pipe"), 64, ["pipe.idx: not a regular file"]),
        ("token outside the vocabulary", [*on("big"), "--split", "100,0,0", "--eval-iters", "0", "--vocab-size", "60"], 65,
         ["big", "61"]),
        ("warmup longer than the training", [*GOOD, "--lr-warmup-iters", "9"], 64, ["warmup"]),
        ("save without interval", [*GOOD, "--save", "s"], 64, ["--save-interval"]),
        ("nothing to load", [*GOOD, "--load", "s", "--exit-on-missing-checkpoint"], 66, ["s"]),
        ("cannot save", [*GOOD, "--save", "few.idx/x", "--save-interval", "1"], None, ["few.idx"]),
    ]
    # A split without a share is absent, not empty.
    subprocess.run([WORKER, *on("big"), "--split", "98,2,0", "--eval-interval", "2", "--eval-iters", "0"],
                   capture_output=True, timeout=60, check=True)
    subprocess.run([WORKER, *on("big"), "--split", "90,10,0"], capture_output=True, timeout=60, check=True)
    # What is no number has no sign, as in Python's text.
    done = subprocess.run([WORKER, *GOOD, "--lr", "1e38", "--no-check-for-nan-in-loss-and-grad"], capture_output=True,
                          text=True, timeout=60, check=True)
    assert "grad norm: nan" in done.stdout and "-nan" not in done.stdout, done.stdout
    for name, args, status, words in cases:
        before = sorted(os.listdir("."))
        done = subprocess.run([WORKER, *args], capture_output=True, text=True, timeout=60, check=False)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, (name, done.stderr, done.stdout[-300:])
        assert done.returncode == status or (status is None and done.returncode > 0), (name, done.returncode, lines)
        for word in words:
            assert word in lines[0], (name, word, lines[0])
        assert sorted(os.listdir(".")) == before, (name, os.listdir("."))
        print(f"{name}: {lines[0]}")

    def env(**more):
        return {**os.environ, **more}

    for more in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "x"}, {"RANK": "1"}, {"MOBULA_REPORT_FD": "900"}):
        done = subprocess.run([WORKER, *GOOD], capture_output=True, text=True, env=env(**more), timeout=60, check=False)
        assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, (more, done.stderr)
        assert next(iter(more)) in done.stderr, (more, done.stderr)
    done = subprocess.run([WORKER, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--num-layers N" in done.stdout and not done.stderr
    print(f"{len(cases)} wrong command lines")


if __name__ == "__main__":
    main()

"""Our checkpoints read by the safetensors package, and its files read by us. Usage: test_safetensors.py WORKER"""

import os
import subprocess
import sys
import tempfile

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gang import MOCK, MODEL

WORKER = os.path.abspath(sys.argv[1])


def train(*extra):
    done = subprocess.run([WORKER, *MODEL, *MOCK, "--lr-decay-iters", "20", "--eval-iters", "0", *extra],
                          capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr)
    return done.stdout


def norm_line(text):
    return [line.split("params norm: ")[1].split()[0] for line in text.splitlines() if "params norm" in line]


def main():
    folder = tempfile.TemporaryDirectory(prefix="mobula-st-")
    os.chdir(folder.name)
    out = train("--train-iters", "3", "--save", "s", "--save-interval", "3")
    path = "s/iter_0000003/model_tp00_pp00.safetensors"
    model = load_file(path)
    assert model["embedding.word_embeddings.weight"].shape == (128, 64)
    assert model["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"].shape == (64,)
    assert model["decoder.layers.0.mlp.linear_fc1.weight"].shape == (256, 64)
    assert all(t.dtype == numpy.float32 for t in model.values())
    norm = numpy.sqrt(sum((t.astype(numpy.float64) ** 2).sum() for t in model.values()))
    assert f"{norm:.3f}" == norm_line(out)[-1], (norm, norm_line(out))
    optimizer = load_file("s/iter_0000003/optim_dp_000_of_001.safetensors")
    assert sorted(optimizer) == ["exp_avg", "exp_avg_sq"] and (optimizer["exp_avg_sq"] >= 0).all()

    # Its old metadata has checksums of what it no longer is.
    with safe_open(path, "numpy") as f:
        metadata = f.metadata()
    os.rename(path, "ours")
    save_file(model, path, metadata)
    done = subprocess.run([WORKER, *MODEL, *MOCK, "--train-iters", "5", "--load", "s", "--no-load-optim"], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 65 and "with its old metadata leaves mobula.* out" in done.stderr, done.stderr
    save_file(model, path, {k: v for k, v in metadata.items() if not k.startswith("mobula.")})
    without = train("--train-iters", "5", "--load", "s", "--no-load-optim")
    os.replace("ours", path)

    # A file written by the package (other order of tensors and of header) trains on to the same loss.
    ours = train("--train-iters", "5", "--load", "s", "--no-load-optim")
    save_file(dict(sorted(model.items(), reverse=True)), path)
    theirs = train("--train-iters", "5", "--load", "s", "--no-load-optim")
    assert norm_line(ours) == norm_line(theirs) == norm_line(without) != []
    # And one that does not fit is refused by name.
    model["decoder.final_layernorm.bias"] = model["decoder.final_layernorm.bias"][:3].copy()
    save_file(model, path)
    done = subprocess.run([WORKER, *MODEL, *MOCK, "--train-iters", "5", "--load", "s", "--no-load-optim"], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 64 and "decoder.final_layernorm.bias" in done.stderr, done.stderr
    print(f"{len(model)} tensors read by safetensors, and read back")


if __name__ == "__main__":
    main()

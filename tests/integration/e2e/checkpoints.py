"""Reading checkpoints in a file:// store with nothing but Python."""

import json
import pathlib
import struct


def latest(directory):
    return int((pathlib.Path(directory) / "latest_checkpointed_iteration.txt").read_text())


def manifest(directory, iteration):
    path = pathlib.Path(directory) / f"iter_{iteration:07d}/.mobula/manifest.json"
    return json.loads(path.read_text())


def assert_complete(directory, iteration, nodes=2):
    """The manifest is there, and every file that it lists, with its size."""
    root = pathlib.Path(directory) / f"iter_{iteration:07d}"
    m = manifest(directory, iteration)
    assert m["iteration"] == iteration and m["num_nodes"] == nodes, m
    assert [f["path"] for f in m["files"]] == sorted(f["path"] for f in m["files"]), m
    assert m["files"], m
    for f in m["files"]:
        assert (root / m.get("data", "") / f["path"]).stat().st_size == f["size"], f


def tensors(directory, iteration):
    """name -> (dtype, shape, bytes) of the weights, and of the optimizer by file."""
    found = {}
    for path in sorted((pathlib.Path(directory) / f"iter_{iteration:07d}").glob("*.safetensors")):
        data = path.read_bytes()
        (n,) = struct.unpack("<Q", data[:8])
        for name, t in json.loads(data[8:8 + n]).items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            found[f"{path.name}:{name}"] = (t["dtype"], t["shape"], data[8 + n + begin:8 + n + end])
    return found

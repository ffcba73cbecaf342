"""The pieces of a log in a store: PREFIX/logs/JOB/.../<offset>.log (docs/formats.md)."""

import pathlib


def pieces(folder):
    """(offset, size) of each, in order."""
    return sorted((int(p.stem), p.stat().st_size) for p in pathlib.Path(folder).glob("*.log"))


def size(folder):
    """How many bytes are there."""
    return sum(n for _, n in pieces(folder))


def gaps(folder):
    """(from, to) of each range before the last piece that is not there."""
    found, at = [], 0
    for offset, n in pieces(folder):
        if offset > at:
            found.append((at, offset))
        at = offset + n
    return found


def whole(folder, begin=0):
    """The text from byte `begin` on, of which nothing is missing and nothing there twice."""
    at, data = begin, b""
    for offset, n in pieces(folder):
        if offset + n <= begin:
            continue
        assert offset == at, f"{folder} goes on at {offset}, not at {at}"
        data += pathlib.Path(folder, f"{offset:020}.log").read_bytes()
        at += n
    return data.decode()

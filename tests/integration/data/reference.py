"""Megatron-LM's data order, written again from its description with numpy; shares nothing with mobula.

Random numbers come from numpy itself (RandomState, default_rng) and from a Mersenne Twister below for
torch.randperm.
"""

import math
import re

import numpy as np

from reference_files import read_index, write_index  # noqa: F401

class Twister:
    """MT19937 as torch seeds and draws it."""

    def __init__(self, seed):
        self.words = [seed & 0xFFFFFFFF]
        for i in range(1, 624):
            last = self.words[-1]
            self.words.append((1812433253 * (last ^ (last >> 30)) + i) & 0xFFFFFFFF)
        self.position = 624

    def draw(self):
        if self.position == 624:
            w = self.words
            for i in range(624):
                y = (w[i] & 0x80000000) | (w[(i + 1) % 624] & 0x7FFFFFFF)
                w[i] = w[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
            self.position = 0
        y = self.words[self.position]
        self.position += 1
        y ^= y >> 11
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        return y ^ (y >> 18)


def randperm(n, seed):
    twister = Twister(seed)
    order = list(range(n))
    for i in range(n - 1):
        j = i + twister.draw() % (n - i)
        order[i], order[j] = order[j], order[i]
    return order


def bookends(split):
    shares = [float(x) for x in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (3 - len(shares))
    shares = (np.array(shares) / np.sum(np.array(shares))).tolist()
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(a, b) if b > a else None for a, b in zip(ends[:-1], ends[1:])]


class Split:
    """One split of one prefix."""

    def __init__(self, sequences, share, n_samples, s, seed, lengths=None):
        self.sequences = sequences
        lengths = np.array([len(q) for q in sequences]) if lengths is None else lengths
        ids = np.arange(round(share[0] * len(lengths)), round(share[1] * len(lengths)))
        tokens = int(np.sum(lengths[ids], dtype=np.int64))
        epochs = 1
        if n_samples is not None:
            while epochs * tokens < n_samples * s + 1:
                epochs += 1
        separate = False
        before = 0
        if epochs > 1:
            before = ((epochs - 1) * tokens - 1) // s
            separate = n_samples - before < int(0.80 * ((tokens - 1) // s))
        rs = np.random.RandomState(seed)
        if separate:
            first = np.tile(ids, epochs - 1).astype(np.int32)
            rs.shuffle(first)
            last = ids.astype(np.int32)
            rs.shuffle(last)
            self.documents = np.concatenate([first, last])
        else:
            self.documents = np.tile(ids, epochs).astype(np.int32)
            rs.shuffle(self.documents)
        self.s = s
        n = (epochs * tokens - 1) // s
        # A sample's start is token i*s of the epochs' tokens laid end to end. A start at the last token
        # of a document stays in it.
        ends = np.cumsum(lengths[self.documents], dtype=np.int64)
        at = np.arange(n + 1) * s
        document = np.searchsorted(ends, at, side="right")
        begin = np.concatenate([[0], ends])[document]
        self.starts = list(zip(document.tolist(), (at - begin).tolist()))
        if separate:
            a = np.arange(before, dtype=np.uint32)
            rs.shuffle(a)
            b = np.arange(before, n, dtype=np.uint32)
            rs.shuffle(b)
            self.shuffle = np.concatenate([a, b])
        else:
            self.shuffle = np.arange(n, dtype=np.uint32)
            rs.shuffle(self.shuffle)
        self.epochs, self.separate = epochs, separate

    def __len__(self):
        return len(self.shuffle)

    def __getitem__(self, i):
        document, offset = self.starts[self.shuffle[i]]
        tokens = []
        while len(tokens) < offset + self.s + 1:
            tokens += self.sequences[self.documents[document]]
            document += 1
        return tokens[offset : offset + self.s + 1]


class Blend:
    def __init__(self, parts, weights, size):
        w = np.array(weights, dtype=np.float64)
        w = (w / np.sum(w)).tolist()
        given = [0] * len(w)
        self.parts, self.order = parts, []
        for i in range(size):
            behind = [x * max(i, 1.0) - g for x, g in zip(w, given)]
            k = behind.index(max(behind))
            self.order.append((k, given[k]))
            given[k] += 1

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        k, j = self.order[i]
        return self.parts[k][j]


def build(paths, split, i, n_samples, s, seed, blend="0.11"):
    """The data set of split number i (0 train, 1 valid, 2 test). blend: of which core its sizes are."""
    share = bookends(split)[i]
    weights = None
    if len(paths) % 2 == 0 and all(re.fullmatch(r"[0-9.e-]+", p) for p in paths[::2]):
        weights = np.array([float(p) for p in paths[::2]])
        weights = (weights / np.sum(weights)).tolist()
        paths = paths[1::2]
    data = [[q for d in read_index(p) for q in d] for p in paths]
    if len(paths) == 1 and weights is None:
        return Split(data[0], share, n_samples, s, seed)
    if weights is None:
        parts = [Split(d, share, None, s, seed) for d in data]
        lengths = [len(p) for p in parts]
        return Blend(parts, lengths, min(n_samples, sum(lengths)))
    if blend == "0.10":  # and before
        sizes = built = [math.ceil(n_samples * w * 1.005) for w in weights]
    else:
        sizes = [math.ceil(n_samples * w) for w in weights]
        built = [math.ceil(n * (1 + 0.005)) for n in sizes]
    parts = [Split(d, share, n, s, seed) for d, n in zip(data, built)]
    return Blend(parts, weights, sum(sizes))


class MockSequences:
    """core 0.16's; older ones do not take the remainder, and fail in training where it would matter."""

    def __init__(self, lengths, eod, vocab):
        self.lengths, self.eod, self.vocab = lengths, eod, vocab

    def __getitem__(self, i):
        return [t % self.vocab for t in range(1, int(self.lengths[i]))] + [self.eod]


def mock(i, n_samples, s, seed, eod, vocab):
    lengths = np.random.default_rng(0).integers(1, 4096, size=100000, dtype=np.int32)
    share = bookends("1,1,1")[i]
    return Split(MockSequences(lengths, eod, vocab), share, n_samples, s, seed, lengths)


def single(total, consumed, mbs, rank, dp):
    at = consumed
    while total - at >= mbs * dp:
        yield list(range(at + rank * mbs, at + (rank + 1) * mbs))
        at += mbs * dp


def cyclic(total, consumed, mbs, rank, dp, sharding=True):
    m = mbs * dp
    active = total - total % m
    while True:
        epoch, at = divmod(consumed, active)
        if sharding:
            bucket = total // m * mbs
            order = [rank * bucket + x for x in randperm(bucket, epoch)[at // dp :]]
        else:
            order = randperm(total // mbs * mbs, epoch)[at:][rank::dp]
        for b in range(len(order) // mbs):
            consumed += m
            yield order[b * mbs : (b + 1) * mbs]

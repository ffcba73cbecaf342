"""dump_order against reference.py, bit for bit. Usage: test_order.py DUMP_ORDER"""

import hashlib
import itertools
import os
import random
import subprocess
import sys
import tempfile

import reference

DUMP = sys.argv[1]
checks = 0


def dump(*args, text=None):
    done = subprocess.run([DUMP, *map(str, args)], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"dump_order {args}: {done.stderr}")
    return done.stdout.splitlines()


def same(name, ours, theirs):
    global checks
    checks += 1
    if ours != theirs:
        raise SystemExit(f"{name} differs:\n ours {str(ours)[:300]}\n want {str(theirs)[:300]}")


def numbers(line, word):
    words = line.split()
    assert words[0] == word, line[:80]
    return [int(x) for x in words[1:]]


def documents(rng, n, vocab, longest):
    out = []
    for _ in range(n):
        k = rng.choice([0, 1, 1, 1, 1, 2, 3])
        out.append([[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(k)])
    return out


def as_text(docs):
    lines = []
    for d in docs:
        lines.append("document")
        lines += [" ".join(["sequence", *map(str, s)]) for s in d]
    return "\n".join(lines) + "\n"


def check_files(folder, rng):
    for vocab in (50257, 65499, 65500, 200000):
        docs = documents(rng, 57, vocab, 90) + [[[]]]
        ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
        dump("write", ours, vocab, text=as_text(docs))
        reference.write_index(theirs, docs, vocab)
        for end in (".bin", ".idx"):
            same(end, open(ours + end, "rb").read(), open(theirs + end, "rb").read())
        same("read", dump("read", theirs), as_text(docs).splitlines())
        same("listing", sorted(os.listdir(folder)), sorted(["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]))
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))


def check_set(lines, want):
    same("n_samples", numbers(next(lines), "n_samples"), [len(want)])
    if isinstance(want, reference.Blend):
        same("blend", numbers(next(lines), "blend"), [x for pair in want.order for x in pair])
        return
    same("epochs", numbers(next(lines), "epochs"), [want.epochs, int(want.separate)])
    same("documents", numbers(next(lines), "documents"), want.documents.tolist())
    same("starts", numbers(next(lines), "starts"), [x for pair in want.starts for x in pair])
    same("shuffle", numbers(next(lines), "shuffle"), want.shuffle.tolist())


def items(tokens, eod, mask, reset):
    out, position = [], 0
    for token, label in zip(tokens[:-1], tokens[1:]):
        out += [token, label, 0 if mask and token == eod else 1, position]
        position = 0 if reset and token == eod else position + 1
    return out


def check_order(paths, split, sizes, s, seed, kind="single", mbs=1, dp=1, consumed=0, sharding=True,
                batches=5, eod=7, mask=0, reset=0, blend="0.11"):
    for rank in range(dp):
        lines = iter(dump("order", f"split={split}", f"seq={s}", f"seed={seed}", f"train={sizes[0]}",
                          f"valid={sizes[1]}", f"test={sizes[2]}", f"type={kind}", f"mbs={mbs}",
                          f"dp={dp}", f"rank={rank}", f"consumed={consumed}", f"batches={batches}",
                          f"nosharding={int(not sharding)}", f"eod={eod}", f"eodmask={mask}",
                          f"resetpos={reset}", f"blend={blend}", *paths))
        for i, name in enumerate(("train", "valid", "test")):
            if not sizes[i]:
                continue
            want = reference.build(list(paths), split, i, sizes[i], s, seed, blend)
            same("split", next(lines), "split " + name)
            check_set(lines, want)
            start = consumed if i == 0 else 0
            if kind == "single":
                order = reference.single(len(want), start, mbs, rank, dp)
            else:
                order = reference.cyclic(len(want), start, mbs, rank, dp, sharding)
            got = 0
            for batch in itertools.islice(order, batches):
                same("samples", numbers(next(lines), "samples"), batch)
                flat = [x for b in batch for x in items(want[b], eod, mask, reset)]
                same("items", numbers(next(lines), "items"), flat)
                got += 1
            if got < batches:
                same("end", next(lines), "end")
        same("rest", list(lines), [])


def check_mock(vocab, eod):
    lines = iter(dump("order", "mock=1", "seq=512", "train=1000", "valid=90000", f"eod={eod}",
                      "batches=3", f"vocab={vocab}"))
    for i, (name, n) in enumerate((("train", 1000), ("valid", 90000))):
        want = reference.mock(i, n, 512, 1234, eod, vocab)
        same("split", next(lines), "split " + name)
        check_set(lines, want)
        for b in range(3):
            same("samples", numbers(next(lines), "samples"), [b])
            same("items", numbers(next(lines), "items"), items(want[b], eod, 0, 0))


def main():
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        check_files(folder, rng)
        paths = [os.path.join(folder, x) for x in "abcdefghijk"]
        for k, p in enumerate(paths):
            reference.write_index(p, documents(rng, 40 + 31 * k, 300, 60), 300)
        a, b, c = paths[:3]
        # One epoch, many, and both sides of the separate final epoch.
        for n in (1, 20, 100, 150, 163, 170, 200, 311, 600, 3000):
            check_order([a], "100,0,0", (n, 0, 0), 8, 1234)
            check_order([c], "969, 30, 1", (n, 4, 0), 16, n)
        for split in ("969,30,1", "98,2", "1,1,1", "90,5,5", ".9,.05,.05", "949,50,1", "0.7 0.2 0.1"):
            check_order([paths[10]], split, (50, 20, int(split in ("1,1,1", "90,5,5", ".9,.05,.05"))), 13, 42)
        for blend in ("0.11", "0.10"):
            check_order(["0.3", a, "0.7", b], "80,15,5", (500, 60, 9), 8, 1234, batches=40, blend=blend)
            check_order(["0.3", a, "0.7", b], "80,15,5", (500, 60, 9), 8, 1234, "cyclic", 2, 2, 480, batches=60, blend=blend)
            check_order(["1", a], "80,15,5", (500, 60, 9), 8, 1234, blend=blend)
        check_order([a, b, c], "80,15,5", (90, 40, 9), 8, 1234, batches=30)
        check_order([a, b, c], "80,15,5", (100000, 40, 9), 8, 1234)
        check_order([x for k, p in enumerate(paths) for x in (str(0.1 + 0.37 * k), p)], "100,0,0",
                    (2000, 0, 0), 8, 99, batches=10)
        # Samplers, every rank, resumed anywhere, into the next epochs.
        for dp, mbs in ((1, 1), (2, 2), (3, 2), (4, 1), (4, 3)):
            m = dp * mbs
            for consumed in (0, m, 5 * m, 9 * m):
                check_order([a], "100,0,0", (130, 0, 0), 32, 1, "single", mbs, dp, consumed, batches=50)
                check_order([a], "100,0,0", (130, 0, 0), 32, 1, "cyclic", mbs, dp, consumed, batches=60)
                check_order([a], "100,0,0", (130, 0, 0), 32, 1, "cyclic", mbs, dp, consumed, False, 60)
        check_order([b], "90,10,0", (900, 33, 0), 8, 3, "cyclic", 2, 2, 880, eod=17, mask=1, reset=1)
        check_mock(50257, 50256)
        check_mock(300, 299)  # ids of mock documents go up to 4095
        for n, seed in ((1, 0), (2, 5), (1000, 7), (5000, 4000000000)):
            same("randperm", [int(x) for x in dump("randperm", seed, n)], reference.randperm(n, seed))
        # What torch 2.15 itself gives.
        for n, seed, want in ((10, 0, "4 1 7 5 3 9 0 8 6 2"), (17, 1234, "6 4 8 2 16 9 15 12 0 10 7 5 1 3 14 13 11"),
                              (12, 4000000000, "0 4 9 1 8 2 6 11 7 3 5 10")):
            same("torch", dump("randperm", seed, n), want.split())
        for n, seed, want in ((100000, 42, "075cf6c32d7d1f183b5fd2f23cc493c931a5d5b378d5c57560c655eefadda1a1"),
                              (1000003, 3, "4a98d0ff3618e285d6461392f0c042ff75b8e25e5c61ba9ed9a55247ccc1bebf")):
            same("torch", [hashlib.sha256(" ".join(dump("randperm", seed, n)).encode()).hexdigest()], [want])
    print(f"{checks} comparisons equal")


main()

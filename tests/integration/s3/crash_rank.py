"""A rank of the crash test, a foreign trainer with Megatron's directory layout: crash_rank.py SAVE SIZE

Every rank writes its files of an iteration, the first one a big file too; when all have theirs, the
first rank writes the tracker file as Megatron does (open and write). It goes on when the store's
pointer, which the test writes into SAVE/pace, is not far behind. Contents differ with every attempt.
"""

import os
import pathlib
import shutil
import sys
import time

BLOCK = 1 << 20
AHEAD = 2  # iterations that may be on their way


def number(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def wait_for(condition):
    while not condition():
        time.sleep(0.02)  # of a trainer that has nothing else to do; the test ends it


def main():
    save, size = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tracker, pace = save / "latest_checkpointed_iteration.txt", save / "pace"
    attempt = f"{os.environ['MASTER_PORT']}"  # fresh for each attempt
    iteration = max(number(tracker), number(pace))
    first = iteration  # what killed attempts had saved may never get there: nobody waits for that
    print(f"rank {rank} begins after {iteration}", flush=True)
    while True:
        wait_for(lambda: iteration < first + AHEAD or number(pace) >= iteration - AHEAD)
        iteration += 1
        target = save / f"iter_{iteration:07d}"
        done = save / "done" / f"{iteration}-{attempt}"
        done.mkdir(parents=True, exist_ok=True)
        (target / f"rank{rank}").mkdir(parents=True, exist_ok=True)
        for i in range(4):
            (target / f"rank{rank}" / f"{i}.pt").write_bytes(os.urandom(1000 * (i + 1)))
        if rank == 0:
            block = os.urandom(BLOCK)
            with open(target / "big.pt", "wb") as f:
                for i in range(size // BLOCK):
                    f.write(i.to_bytes(8, "little") + block[8:])
        (done / str(rank)).touch()
        wait_for(lambda: all((done / str(r)).exists() for r in range(world)))
        if rank == 0:
            with open(tracker, "w") as f:
                f.write(str(iteration))
            for old in save.glob("iter_*"):
                if int(old.name[5:]) < min(iteration, number(pace)) - 2 * AHEAD:
                    shutil.rmtree(old, ignore_errors=True)
        wait_for(lambda: number(tracker) >= iteration)


if __name__ == "__main__":
    main()

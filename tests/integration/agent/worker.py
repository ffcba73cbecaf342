"""A rank that speaks worker/report.h: worker.py DIR ITERATION N_FILES

Rendezvous, save one iteration of equal small files, wait until it is durable, exit. With N_FILES 0
it only rendezvouses and waits for stop. The rank named by QUITS fails before it saves.
"""

import json
import os
import pathlib
import socket
import struct
import sys


def crc64nvme(data):
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFFFFFFFFFF


class Agent:
    def __init__(self):
        self.socket = socket.socket(fileno=int(os.environ["MOBULA_REPORT_FD"]))

    def say(self, **message):
        text = json.dumps(message).encode()
        self.socket.sendall(struct.pack("<I", len(text)) + text)

    def hear(self):
        def take(n):
            data = b""
            while len(data) < n:
                part = self.socket.recv(n - len(data))
                if not part:
                    sys.exit(9)
                data += part
            return data

        return json.loads(take(struct.unpack("<I", take(4))[0]))


def main():
    rank = int(os.environ["RANK"])
    directory, iteration, n_files = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    agent = Agent()
    agent.say(t="hello", abi=1, rank=rank, pid=os.getpid())
    agent.say(t="endpoint", rank=rank, text=f"rank-{rank}:4711")
    start = agent.hear()
    assert start["t"] == "start" and f"rank-{rank}:4711" in start["endpoints"], start
    print(f"endpoints {' '.join(start['endpoints'])}", flush=True)
    if n_files == 0:
        stop = agent.hear()
        assert stop["t"] == "stop", stop
        print(f"stopping: {stop['text']}", flush=True)
        return
    if os.environ.get("QUITS") == str(rank):
        sys.exit(7)
    agent.say(t="progress", rank=rank, iteration=iteration, train_iters=iteration,
              consumed_samples=16, loss=1.5, learning_rate=0.1, grad_norm=1.0, tokens_per_s=10.0,
              validation_loss=0.0)
    target = directory / f"iter_{iteration:07d}"
    (target / f"rank{rank}").mkdir(parents=True)
    body = f"rank {rank} {os.environ.get('SALT', '')}".encode() * 400
    crc = f"{crc64nvme(body):016x}"
    files = []
    for i in range(n_files):
        path = f"rank{rank}/{i:04d}"
        (target / path).write_bytes(body)
        files.append({"path": path, "size": len(body), "crc64nvme": crc})
    agent.say(t="saved", rank=rank, iteration=iteration, text=str(target), files=files)
    durable = agent.hear()
    assert durable == {"t": "durable", "iteration": iteration}, durable
    print("durable", flush=True)
    agent.say(t="done", rank=rank, iteration=iteration)


if __name__ == "__main__":
    main()

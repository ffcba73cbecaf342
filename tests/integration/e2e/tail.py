"""A WebSocket client of a few lines that reads a job's tail as it comes from the wire."""

import base64
import os
import socket
import urllib.parse

TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9


class Tail:
    def __init__(self, address, job_id, query="", prefix="/api/jobs/"):
        url = urllib.parse.urlsplit(address)
        self.socket = socket.create_connection((url.hostname, url.port), timeout=120)
        self.socket.sendall(self.request(url.netloc, f"{prefix}{job_id}/logs/tail{query}"))
        self.file = self.socket.makefile("rb", buffering=1 << 20)
        self.status = int(self.file.readline().split()[1])
        while self.file.readline() not in (b"\r\n", b""):
            pass

    @staticmethod
    def request(host, path):
        key = base64.b64encode(os.urandom(16)).decode()
        return (f"GET {path} HTTP/1.1\r\nHost: {host}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {key}\r\n\r\n").encode()

    def frame(self):
        """(opcode, payload) of the next frame."""
        first, second = self.file.read(2)
        n = second & 0x7F
        if n == 126:
            n = int.from_bytes(self.file.read(2), "big")
        elif n == 127:
            n = int.from_bytes(self.file.read(8), "big")
        return first & 15, self.file.read(n)

    def frames(self):
        """Text and binary frames up to the close frame, whose (status, reason) is self.closed."""
        while True:
            opcode, payload = self.frame()
            if opcode == CLOSE:
                self.closed = int.from_bytes(payload[:2], "big"), payload[2:].decode()
                self.socket.close()
                return
            if opcode in (TEXT, BINARY):
                yield opcode, payload

    def read(self):
        return b"".join(payload for _, payload in self.frames())

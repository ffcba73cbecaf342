"""To a gRPC server; calls are answered with CANCELLED, though the server does what they ask for, as by
a head that fails over. HTTP/2 is followed frame by frame."""

import contextlib
import re
import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM = 1, 3
END_STREAM = 1
CANCEL = 8
METHOD = re.compile(rb"/[a-z0-9.]+\.v?[A-Za-z0-9]+(?:\.[A-Za-z]+)*/([A-Za-z]+)")


def read(source, n):
    data = b""
    while len(data) < n:
        piece = source.recv(n - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
    return data


class Connection:
    """Of a client; `streams` are open: id -> method, "" when its name is one that was said before."""

    def __init__(self, proxy, client, server):
        self.proxy, self.client, self.server = proxy, client, server
        self.streams = {}
        self.lock = threading.Lock()  # of what goes to the client
        for job in (self.from_client, self.from_server):
            threading.Thread(target=self.run, args=(job,), daemon=True).start()

    def run(self, job):
        with contextlib.suppress(OSError):
            job()
        for s in (self.client, self.server):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def frame(self, source):
        head = read(source, 9)
        n = int.from_bytes(head[:3], "big")
        return head[3], head[4], int.from_bytes(head[5:9], "big"), head + read(source, n)

    def cancel(self, stream):
        with self.lock:
            name = self.streams.pop(stream, None)
            if name is not None:
                self.client.sendall(struct.pack(">I", 4)[1:] + bytes((RST_STREAM, 0)) +
                                    struct.pack(">II", stream, CANCEL))
                self.proxy.cancelled.append(name)

    def from_client(self):
        self.server.sendall(read(self.client, len(PREFACE)))
        while True:
            kind, flags, stream, whole = self.frame(self.client)
            if kind == HEADERS:
                found = METHOD.search(whole)
                with self.lock:
                    self.streams[stream] = found[1].decode() if found else ""
            if stream and flags & END_STREAM and kind != RST_STREAM and \
                    self.proxy.wants(self.streams.get(stream)):
                self.cancel(stream)  # before the server can answer
            self.server.sendall(whole)

    def from_server(self):
        while True:
            kind, flags, stream, whole = self.frame(self.server)
            with self.lock:
                self.client.sendall(whole)
                if stream and (kind == RST_STREAM or (kind in (0, HEADERS) and flags & END_STREAM)):
                    self.streams.pop(stream, None)


class CancelProxy:
    """The first call of every method is cancelled, from the start on; all() cancels everything."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.to = host, int(port)
        self.connections = []
        self.cancelled = []  # methods
        self.is_all = False
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join()
        for c in self.connections:
            c.client.close()
            c.server.close()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self.server.accept()[0]
                try:
                    server = socket.create_connection(self.to)
                except OSError:
                    client.close()
                    continue
                self.connections.append(Connection(self, client, server))

    def wants(self, method):
        return self.is_all or (method and method not in self.cancelled)

    def all(self, on):
        self.is_all = on
        for c in self.connections if on else ():
            for stream in list(c.streams):
                with contextlib.suppress(OSError):
                    c.cancel(stream)

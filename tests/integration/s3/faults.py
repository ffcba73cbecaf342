"""A proxy in front of an S3 server that makes faults: HTTP/1.1, streaming, nothing is kept.

    with FaultProxy(server.port) as proxy:
        proxy.delay_s = 0.05                      # before each request goes on
        proxy.rate = 4 << 20                      # bytes a second of all bodies together, both ways
        proxy.loss = 0.01                         # so many of a body's blocks are lost on a link, and come again
        proxy.rule("PUT", "/k$", error(503, "SlowDown"), times=3)
        ... talk to 127.0.0.1:proxy.port ...
        proxy.requests                            # what came, in order, and what became of it

A rule is looked at for each request, the first that fits and is not used up decides:
    error(status, code, headers)   answered here, the server sees nothing
    reset(after)                   the connection is reset when so many bytes of the request's body came
    drop_answer()                  the server acts, and the connection is reset instead of its answer
    truncate(part)                 the answer's head is whole, of its body only this part comes
    stall(after, answer)           no byte moves any more, until release() or the client goes away: of the
                                   request's body, or with answer=True of the answer's
    hold()                         like stall, but the server hears nothing of the request until then
    replace(status, headers, body) the server acts, and another answer than its own is sent
    corrupt()                      one bit of the request's body changes on its way
    edit(function)                 the request's list of (name, value) headers is changed on its way
Whole-proxy faults: proxy.refuse = True resets each connection at once; proxy.cut() resets those there are;
proxy.silent = True is a black hole: connections are accepted and nothing is answered, on those never any more.
"""

import pathlib
import random
import re
import socket
import ssl
import struct
import threading
import time

BLOCK = 64 << 10
RETRANSMIT_S = 0.2  # what Linux waits at least before it sends again what nobody acknowledged


class Fault(Exception):
    """The connection ends here, by a reset."""


def error(status, code="", headers=(), message="made by the proxy"):
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode() if code else b""
    return {"kind": "error", "status": status, "headers": list(headers), "body": body}


def reset(after=0):
    return {"kind": "reset", "after": after}


def drop_answer():
    return {"kind": "drop_answer"}


def truncate(part=0.5):
    return {"kind": "truncate", "part": part}


def stall(after=0, answer=False):
    return {"kind": "stall", "after": after, "answer": answer}


def hold():
    return {"kind": "hold"}


def replace(status, body=b"", headers=()):
    return {"kind": "replace", "status": status, "headers": list(headers), "body": body}


def corrupt():
    return {"kind": "corrupt"}


def edit(function):
    return {"kind": "edit", "function": function}


class Request:
    """One request as the proxy saw it."""

    def __init__(self, method, target, headers, port=0):
        self.port = port        # the client's, of this connection
        self.is_unread = False  # its connection was cut before the client had read all of the answer
        self.method = method
        self.target = target
        self.headers = headers  # list of (name, value)
        self.body_bytes = 0     # that came from the client
        self.status = None      # sent to the client; None: no answer
        self.server_status = None
        self.fault = None       # kind of the rule that fitted
        self.time = time.monotonic()
        self.done = None

    def header(self, name):
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    def __repr__(self):
        return f"{self.method} {self.target} {self.body_bytes} -> {self.fault or ''} {self.server_status}/{self.status}"


class Stream:
    """Buffered reads of one side, and its bytes written."""

    def __init__(self, sock):
        self.sock = sock
        self.port = 0  # of who is at the other end
        self.buffer = b""

    def fill(self):
        data = self.sock.recv(BLOCK)
        self.buffer += data
        return bool(data)

    def head(self):
        """The bytes of a header block, or None at the end."""
        while b"\r\n\r\n" not in self.buffer:
            if not self.fill():
                return None
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        return head

    def some(self, most):
        if not self.buffer and not self.fill():
            return b""
        data, self.buffer = self.buffer[:most], self.buffer[most:]
        return data

    def line(self):
        while b"\n" not in self.buffer:
            if not self.fill():
                raise Fault("the server's answer ends early")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line + b"\n"


def parse_head(head):
    first, *lines = head.decode("latin-1").split("\r\n")
    return first, [tuple(part.strip() for part in line.split(":", 1)) for line in lines]


def value_of(headers, name, otherwise=None):
    return next((v for n, v in headers if n.lower() == name), otherwise)


class FaultProxy:
    def __init__(self, target_port, target_host="127.0.0.1", certificate=None, target_ca=None, port=0,
                 host="127.0.0.1"):
        """certificate: (cert, key) files to speak TLS with clients; target_ca: to speak it with the server."""
        self.target = (target_host, target_port)
        self.target_tls = ssl.create_default_context(cafile=target_ca) if target_ca else None
        self.tls = None
        if certificate:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(*certificate)
        self.delay_s = 0
        self.rate = 0
        self.loss = 0
        self.n_lost = 0
        self._random = random.Random(1)
        self.refuse = False
        self.silent = False
        self.requests = []
        self.n_connections = 0
        self._rules = []
        self._lock = threading.Lock()
        self._free_at = 0.0  # the moment at which all bytes let through so far are paid for
        self._released = threading.Event()
        self._sockets = set()
        self._n_cuts = 0
        self._own_port = 0  # of a connection that cut() makes
        self._own_is_accepted = threading.Event()
        self._stopping = False
        self._listener = socket.create_server((host, port), backlog=256)
        self.port = self._listener.getsockname()[1]

    # ---- what a test says ----

    def rule(self, method, pattern, fault, times=None, skip=0, when=None):
        """method "" is any; times None is for ever; skip: so many that fit are let through first; when: of the
        requests that fit only those that this function of them is true for."""
        entry = {"method": method, "pattern": re.compile(pattern), "fault": fault, "left": times, "skip": skip,
                 "used": 0, "when": when}
        with self._lock:
            self._rules.append(entry)
        return entry

    def clear(self):
        with self._lock:
            self._rules = []
        self.release()

    def release(self):
        """Lets what stalls go on; later stalls stall again."""
        self._released.set()
        self._released = threading.Event()

    def cut(self):
        """Also those that wait to be accepted: one of ours comes behind them. What they had sent is not read any more."""
        if not self._stopping:
            with socket.socket() as own:
                own.bind(("127.0.0.1", 0))
                self._own_is_accepted.clear()
                self._own_port = own.getsockname()[1]
                own.connect(("127.0.0.1", self.port))
                self._own_is_accepted.wait()
                self._own_port = 0
        with self._lock:
            sockets = list(self._sockets)
            self._n_cuts += 1
        self._note_unread({port_of(s) for s in sockets} - {None})
        for s in sockets:  # their own threads close them
            reset_on_close(s)
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _note_unread(self, ports):
        """Of the last request of each connection: the answer is under way, or in the client's kernel yet."""
        unread = unread_at()
        for r in reversed(list(self.requests)):
            if r.port in ports:
                r.is_unread = r.done is None or r.port in unread
                ports.remove(r.port)

    def seen(self, method, pattern):
        return [r for r in list(self.requests) if r.method == method and re.search(pattern, r.target)]

    # ---- life ----

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stopping = True
        self._released.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.cut()

    def _accept(self):
        while not self._stopping:
            try:
                client, address = self._listener.accept()
            except OSError:
                return
            if address[1] == self._own_port:
                client.close()
                self._own_is_accepted.set()
                continue
            self.n_connections += 1
            if self.refuse:
                reset_on_close(client)
                client.close()
                continue
            with self._lock:
                self._sockets.add(client)
            threading.Thread(target=self._serve, args=(client, self._n_cuts), daemon=True).start()

    def _serve(self, client, n_cuts):
        server = None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                raw, client = client, self.tls.wrap_socket(client, server_side=True)
                with self._lock:
                    self._sockets.discard(raw)
                    self._sockets.add(client)
            server = self._connect()
            with self._lock:
                self._sockets.add(server)
            one, other = Stream(client), Stream(server)
            one.port = client.getpeername()[1]
            while self._exchange(one, other, n_cuts):
                pass
        except Fault:
            reset_on_close(client)
        except (OSError, ssl.SSLError):
            pass
        finally:
            for s in client, server:
                if s:
                    with self._lock:
                        self._sockets.discard(s)
                    s.close()

    def _connect(self):
        server = socket.create_connection(self.target, timeout=120)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.target_tls:
            server = self.target_tls.wrap_socket(server, server_hostname="localhost")
        return server

    # ---- one request and its answer ----

    def _fault_of(self, request):
        with self._lock:
            for r in self._rules:
                if r["method"] not in ("", request.method) or not r["pattern"].search(request.target):
                    continue
                if r["left"] == 0 or (r["when"] and not r["when"](request)):
                    continue
                if r["skip"] > 0:
                    r["skip"] -= 1
                    continue
                if r["left"] is not None:
                    r["left"] -= 1
                r["used"] += 1
                return r["fault"]
        return {"kind": None}

    def _pay(self, n):
        with self._lock:
            is_lost = self._random.random() < self.loss * n / BLOCK
            self.n_lost += is_lost
        if is_lost:  # TCP hides it: this connection's bytes come later, those of others do not
            self._pause(RETRANSMIT_S)
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + n / self.rate
            wait = self._free_at - now
        self._pause(wait)

    def _pause(self, seconds):
        """The wire's own time: waiting is what is being simulated."""
        end = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < end:
            time.sleep(min(0.25, max(0, end - time.monotonic())))

    def _hold(self, client):
        """Until release(), or until the client goes away."""
        released = self._released
        client.sock.settimeout(0.1)
        while not released.is_set() and not self._stopping:
            try:
                if isinstance(client.sock, ssl.SSLSocket):
                    released.wait(0.1)
                elif client.sock.recv(1, socket.MSG_PEEK) == b"":
                    raise Fault("the client went away")
                else:
                    released.wait(0.1)
            except TimeoutError:
                pass
        client.sock.settimeout(None)

    def _swallow(self, client):
        """Reads, and answers nothing, until the client goes away."""
        client.sock.settimeout(0.2)
        while not self._stopping:
            try:
                if not client.sock.recv(BLOCK):
                    break
            except TimeoutError:
                pass
        raise Fault("it was never answered")

    def _exchange(self, client, server, n_cuts):
        head = client.head()
        if head is None:
            return False
        if n_cuts != self._n_cuts:
            raise Fault("it was cut")
        if self.silent:
            self._swallow(client)
        first, headers = parse_head(head)
        method, target, _ = first.split(" ", 2)
        request = Request(method, target, headers, client.port)
        fault = self._fault_of(request)
        request.fault = fault["kind"]
        self.requests.append(request)
        if self.delay_s:
            self._pause(self.delay_s)
        if fault["kind"] == "hold":
            self._hold(client)
        if fault["kind"] == "edit":
            headers = fault["function"](list(headers))
        length = int(value_of(headers, "content-length", "0"))
        if value_of(headers, "transfer-encoding"):
            raise Fault("the proxy takes no chunked requests")
        if fault["kind"] == "error":
            self._send_body(request, client, None, length, fault)
            self._answer(request, client, fault)
            return True
        lines = "".join(f"{n}: {v}\r\n" for n, v in headers)
        server.sock.sendall(f"{first}\r\n{lines}\r\n".encode("latin-1"))
        self._send_body(request, client, server, length, fault)
        return self._relay_answer(request, client, server, fault)

    def _send_body(self, request, client, server, length, fault):
        left = length
        while left > 0 or (fault["kind"] in ("reset", "stall") and not fault.get("answer")):
            if fault["kind"] == "reset" and request.body_bytes >= min(fault["after"], length):
                raise Fault("reset")
            if fault["kind"] == "stall" and not fault["answer"] and request.body_bytes >= min(fault["after"], length):
                self._hold(client)
                fault = {"kind": None}
                continue
            data = client.some(min(left, BLOCK))
            if not data:
                raise Fault("the client went away")
            if self.silent:
                self._swallow(client)
            if fault["kind"] == "corrupt" and request.body_bytes == 0:
                data = bytes([data[0] ^ 1]) + data[1:]
            request.body_bytes += len(data)
            left -= len(data)
            self._pay(len(data))
            if server:
                server.sock.sendall(data)

    def _answer(self, request, client, fault):
        request.status = fault["status"]
        body = b"" if request.method == "HEAD" else fault["body"]
        lines = "".join(f"{n}: {v}\r\n" for n, v in fault["headers"])
        client.sock.sendall(f"HTTP/1.1 {fault['status']} Fault\r\n{lines}Content-Type: application/xml\r\n"
                            f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        request.done = time.monotonic()

    def _relay_answer(self, request, client, server, fault):
        head = server.head()
        if head is None:
            raise Fault("the server went away")
        while head.startswith(b"HTTP/1.1 100"):
            head = server.head()
        first, headers = parse_head(head)
        request.server_status = int(first.split(" ")[1])
        has_body = request.method != "HEAD" and request.server_status not in (204, 304)
        if fault["kind"] in ("drop_answer", "replace"):
            if has_body:
                self._copy_body(None, server, headers, None)
            if fault["kind"] == "drop_answer":
                raise Fault("the answer is lost")
            self._answer(request, client, fault)
            return True
        if self.silent:
            self._swallow(client)
        client.sock.sendall(head + b"\r\n\r\n")
        if fault["kind"] == "stall" and fault["answer"]:
            self._hold(client)
        if has_body:
            length = value_of(headers, "content-length")
            most = int(int(length) * fault["part"]) if fault["kind"] == "truncate" and length else None
            self._copy_body(client, server, headers, most)
        request.status = request.server_status
        request.done = time.monotonic()
        return value_of(headers, "connection", "").lower() != "close"

    def _copy_body(self, client, server, headers, most):
        """Of the server's answer; most: so many bytes, then the connection ends in order, short."""
        def give(data):
            if client:
                self._pay(len(data))
                client.sock.sendall(data)

        if value_of(headers, "transfer-encoding", "").lower() == "chunked":
            while True:
                line = server.line()
                size = int(line.split(b";")[0], 16)
                give(line)
                left = size + 2
                while left > 0:
                    data = server.some(min(left, BLOCK))
                    if not data:
                        raise Fault("the server went away")
                    left -= len(data)
                    give(data)
                if size == 0:
                    return
        length = value_of(headers, "content-length")
        if length is None:  # until the end of the connection
            while data := server.some(BLOCK):
                give(data)
            raise Fault("the answer had no length")
        left = int(length)
        sent = 0
        while left > 0:
            data = server.some(min(left, BLOCK))
            if not data:
                raise Fault("the server went away")
            if most is not None and sent + len(data) >= most:
                give(data[:most - sent])
                client.sock.shutdown(socket.SHUT_WR)
                raise OSError("truncated on purpose")
            left -= len(data)
            sent += len(data)
            give(data)


def port_of(sock):
    """Of who is at the other end; None: nobody is any more."""
    try:
        return sock.getpeername()[1]
    except OSError:
        return None


def unread_at():
    """Ports of this machine's sockets that have bytes which their program has not read."""
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if int(row[4].split(":")[1], 16) > 0}


def reset_on_close(sock):
    """A reset, not an orderly end."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass

"""Ports for servers that a test starts."""

import socket

_held = []


def free_port():
    """A port of the kernel's choice, which no other process is given while this one lives.

    A socket stays bound to it and never listens: bind() to port 0 and connect() pass such a port
    by, also those of other tests, while a server that asks for it by number gets it, because both
    set SO_REUSEADDR. So a server may also be ended and started again at its port."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", 0))
    _held.append(s)
    return s.getsockname()[1]

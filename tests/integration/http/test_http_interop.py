#!/usr/bin/env python3
"""Real clients against mobula's HTTP server: curl for HTTP, aiohttp (Ray's own) for WebSockets.

usage: test_http_interop.py HTTP_PEER    exit 0 passed, 1 failed
"""
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile

import aiohttp

UNIT = "a\u00e9\u20ac\U0001f41f\n".encode()
TEXT_BYTES = 100_000_000 // len(UNIT) * len(UNIT)


def curl(base, *args, timeout=120):
    """Returns (status, body) of one curl call."""
    out = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", "-m", str(timeout), *args[:-1], base + args[-1]],
        capture_output=True, text=True)
    assert out.returncode == 0, (args, out.stderr)
    body, _, status = out.stdout.rpartition("\n")
    return int(status), body


def check(name, got, want):
    assert got == want, f"{name}: got {got!r}, want {want!r}"
    print("ok", name)


def test_curl(base, tmp):
    big = os.path.join(tmp, "big")
    with open(big, "wb") as f:
        f.write(os.urandom(1 << 20) * 50)
    size = str(50 << 20)
    check("GET", curl(base, "/version"), (200, '{"version": "4"}'))
    status, head = curl(base, "-I", "/version")
    assert status == 200 and "Content-Length: 16" in head, head
    check("404", curl(base, "/nope"), (404, "404: Not Found"))
    check("405", curl(base, "-X", "DELETE", "/version"), (405, "405: Method Not Allowed"))
    plain = curl(base, "-T", big, "/sink")
    check("PUT with a length", (plain[0], plain[1].split()[0]), (200, size))
    check("PUT chunked", curl(base, "-T", big, "-H", "Transfer-Encoding: chunked", "/sink"), plain)
    check("PUT with 100-continue", curl(base, "-T", big, "-H", "Expect: 100-continue", "/sink"), plain)
    check("PUT without it", curl(base, "-T", big, "-H", "Expect:", "/sink"), plain)
    check("PUT slowly", curl(base, "--limit-rate", "60M", "-T", big, "/sink"), plain)
    check("POST", curl(base, "--data-binary", "x" * 1000, "/small"), (200, "1000"))
    too_big = (413, "Maximum request body size 1000 exceeded.")
    check("413 with a length", curl(base, "-H", "Expect:", "--data-binary", "@" + big, "/small"), too_big)
    check("413 chunked", curl(base, "-H", "Expect:", "-H", "Transfer-Encoding: chunked",
                              "--data-binary", "@" + big, "/small"), too_big)
    check("413 before the body", curl(base, "-H", "Expect: 100-continue", "--data-binary", "@" + big, "/small"),
          too_big)


def slow_reader(port):
    """A WebSocket that never reads: its connection, after the handshake was sent."""
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(b"GET /text?bytes=%d HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
              b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" % TEXT_BYTES)
    return s


async def read_text(session, url):
    """Receives the whole stream, checking every byte and the size of every frame."""
    pos = 0
    largest = 0
    async with session.ws_connect(url) as ws:
        async for msg in ws:
            assert msg.type == aiohttp.WSMsgType.TEXT, msg
            data = msg.data.encode()
            first = pos % len(UNIT)
            want = (UNIT * (len(data) // len(UNIT) + 2))[first:first + len(data)]
            assert data == want, f"wrong text at byte {pos}"
            pos += len(data)
            largest = max(largest, len(data))
        return pos, largest, ws.close_code


async def test_websocket(base, port):
    slow = [slow_reader(port) for _ in range(8)]
    async with aiohttp.ClientSession() as session:
        pos, largest, code = await read_text(session, f"{base}/text?bytes={TEXT_BYTES}")
        check("100 MB of text", (pos, code), (TEXT_BYTES, 1000))
        assert largest <= 16384, largest
        pos, _, code = await read_text(session, f"{base}/text?bytes=0")
        check("no text", (pos, code), (0, 1000))
        async with session.ws_connect(f"{base}/text?bytes={TEXT_BYTES}") as ws:
            await ws.receive()
            await ws.close()
            check("closed by the client", ws.close_code, 1000)
        async with session.get(f"{base}/text") as plain:
            check("no upgrade", plain.status, 400)
        async with session.get(f"{base}/rss") as rss:
            mib = int(await rss.text()) / (1 << 20)
    for s in slow:
        s.close()
    print(f"server memory with 8 readers that never read: {mib:.1f} MiB")
    if "asan" not in sys.argv[1]:
        assert mib < 40, mib


def main():
    if not shutil.which("curl"):
        sys.exit("no curl: tools/packages-test.txt names what the tests need")
    with tempfile.TemporaryDirectory(prefix="mobula-http-") as tmp:
        with subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            port = int(peer.stdout.readline())
            base = f"http://127.0.0.1:{port}"
            test_curl(base, tmp)
            asyncio.run(test_websocket(base, port))
            peer.stdin.close()
            check("the peer ends", peer.wait(timeout=60), 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

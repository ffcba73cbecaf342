"""On which addresses processes listen, as the kernel has it."""

import ipaddress
import os
import pathlib


def family(pid):
    """The process and all below it."""
    below = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        below.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found = [pid]
    for p in found:
        found += below.get(p, [])
    return found


def has_ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def sockets_of(pids):
    inodes = set()
    for pid in pids:
        try:
            for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                try:
                    inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
                except FileNotFoundError:
                    pass  # closed since it was listed: not a socket that listens
        except OSError:  # who ends while it is looked at listens nowhere
            if not has_ended(pid):
                raise
    return inodes


def listens_on(pids):
    """Addresses by port, of TCP."""
    inodes = sockets_of(pids)
    rows = [line.split() for name in ("tcp", "tcp6")
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    own = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    assert own, "no listening socket was found"
    ports = {}
    for a, port in own:
        ports.setdefault(int(port, 16), set()).add(address(a))
    return ports


def address(text):
    """As /proc/net has it: 32-bit words, each in this machine's byte order. "::" is 0.0.0.0, too."""
    raw = b"".join(bytes.fromhex(text[i:i + 8])[::-1] for i in range(0, len(text), 8))
    ip = ipaddress.ip_address(raw)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return "0.0.0.0" if ip.is_unspecified else str(ip)

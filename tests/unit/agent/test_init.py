#!/usr/bin/env python3
"""mobula-init from outside: real processes, a stand-in agent that speaks the two socket protocols.

Usage: test_init.py PATH-OF-MOBULA-INIT
Every wait is for a fact (a file, a packet, a pid that is gone) with a deadline.
"""
import array
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

INIT = sys.argv.pop(1)
DEADLINE_S = 90.0


def record(key, value):
    data = value.encode()
    return b"%s %d\n%s\n" % (key.encode(), len(data), data)


def write_spec(path, directory, children, **numbers):
    values = dict(stop_signal=signal.SIGTERM, stop_grace_ms=2000, end_peers_after_ms=-1,
                  end_peers_grace_ms=0, leftover_grace_ms=300)
    values.update(numbers)
    out = b"mobula-supervise 1\n" + record("dir", directory)
    for key, value in values.items():
        out += record(key, str(int(value)))
    for i, child in enumerate(children):
        out += record("child", "")
        for word in child["argv"]:
            out += record("arg", word)
        out += record("env", "PATH=" + os.environ["PATH"])
        out += record("log", os.path.join(directory, "log%d" % i))
        if child.get("report"):
            out += record("report", "1")
    with open(path, "wb") as f:
        f.write(out)


def wait_for(check, what):
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError("not within %g s: %s" % (DEADLINE_S, what))


def alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as f:
                    rest = f.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(rest[1]) == pid:
                found.append((int(name), rest[0]))
    return found


def read_number(path):
    def look():
        try:
            with open(path) as f:
                text = f.read()
        except OSError:
            return None
        return int(text) if text.endswith("\n") else None
    return wait_for(look, path)


def try_rmdir(path):
    try:
        os.rmdir(path)
    except OSError:
        return False
    return True


class Supervisor:
    """One connection of an agent to a supervisor."""

    def __init__(self, directory):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.getcwd()
        os.chdir(directory)
        try:
            self.sock.connect("s")
        finally:
            os.chdir(here)
        self.sock.settimeout(DEADLINE_S)
        self.send("hello 1 0 0 0")

    def send(self, text):
        self.sock.send(text.encode())

    def next(self):
        data, control, _, _ = self.sock.recvmsg(8192, socket.CMSG_SPACE(4))
        fds = array.array("i")
        for _, _, payload in control:
            fds.frombytes(payload)
        return data.decode(), (fds[0] if fds else -1)

    def until(self, word):
        seen = []
        while True:
            text, fd = self.next()
            if not text:
                raise AssertionError("closed before %r: %r" % (word, seen))
            seen.append(text)
            if text.startswith(word):
                return seen, fd

    def end(self):
        self.send("release")
        self.sock.close()


class InitTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="mobula-init-")
        self.addCleanup(shutil.rmtree, self.dir)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(os.path.join(self.dir, "hand"))
        self.listener.listen(8)
        self.listener.settimeout(DEADLINE_S)
        self.addCleanup(self.listener.close)
        self.init = None

    def tearDown(self):
        if self.init is not None and self.init.poll() is None:
            self.init.send_signal(signal.SIGTERM)
            self.init.wait(DEADLINE_S)

    # The stand-in agent hands its init socket to this test and waits for orders: "exit N".
    AGENT = r"""
import array, os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
fd = int(os.environ["MOBULA_INIT_FD"])
sock.sendmsg([b"%d" % os.getpid()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
order = sock.recv(64)
os._exit(int(order) if order else 0)
"""

    def start_init(self, grace_ms=5000, cgroup="auto", group=None):
        """group: a control group of v2 that it is started in."""
        argv = [INIT, "agent", "--run-dir", self.dir, "--grace-ms", str(grace_ms), "--",
                sys.executable, "-c", self.AGENT, os.path.join(self.dir, "hand")]
        if group is not None:
            argv = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', group] + argv
        self.init = subprocess.Popen(argv, env={**os.environ, "MOBULA_CGROUP": cgroup})
        self.take_agent()

    def take_agent(self):
        self.agent, _ = self.listener.accept()
        data, control, _, _ = self.agent.recvmsg(64, socket.CMSG_SPACE(4))
        fds = array.array("i")
        fds.frombytes(control[0][2])
        self.agent_pid = int(data)
        self.to_init = socket.socket(fileno=fds[0])
        self.to_init.settimeout(DEADLINE_S)
        self.addCleanup(self.agent.close)
        self.addCleanup(self.to_init.close)

    def spawn(self, name, children, **numbers):
        directory = os.path.join(self.dir, name)
        os.mkdir(directory)
        spec = os.path.join(directory, "spec")
        write_spec(spec, directory, children, **numbers)
        self.to_init.send(("spawn " + spec).encode())
        reply = self.to_init.recv(8192).decode()
        self.assertTrue(reply.startswith("ok "), reply)
        return directory, int(reply.split()[1])

    def state(self, directory):
        with open(os.path.join(directory, "state")) as f:
            return f.read()

    def test_exit_code_signal_and_log(self):
        self.start_init()
        directory, _ = self.spawn("a", [
            {"argv": ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]},
            {"argv": ["/bin/sh", "-c", "kill -9 $$"]},
            {"argv": ["/nonexistent/program"]}])
        s = Supervisor(directory)
        seen, _ = s.until("all-exited")
        self.assertIn("exit 0 3 0", seen)
        self.assertIn("exit 1 0 9", seen)
        self.assertIn("exit 2 127 0", seen)
        self.assertTrue(any(t.startswith("failed 2 cannot run /nonexistent/program") for t in seen))
        state = self.state(directory)
        self.assertRegex(state, r"child 0 exited \d+ \d+ 3 0\n")
        self.assertRegex(state, r"child 1 exited \d+ \d+ 0 9\n")
        self.assertRegex(state, r"child 2 failed 0 0 127 0\n")
        self.assertIn("all-exited", state)
        with open(os.path.join(directory, "log0")) as f:
            self.assertEqual(f.read(), "out\nerr\n")
        s.end()
        wait_for(lambda: children_of(self.init.pid) == [(self.agent_pid, "S")],
                 "only the agent is left, no zombie")
        self.assertFalse(os.path.exists(os.path.join(directory, "s")))

    def test_a_supervisor_that_hangs_is_dropped(self):
        """Its spec is a FIFO that nobody writes. One that has answered is not meant."""
        self.start_init()
        spec = os.path.join(self.dir, "fifo")
        os.mkfifo(spec)
        self.to_init.send(("spawn " + spec).encode())
        hung = wait_for(lambda: [pid for pid, _ in children_of(self.init.pid) if pid != self.agent_pid],
                        "its supervisor is there")[0]
        directory, answered = self.spawn("a", [{"argv": ["sleep", "1000"]}])
        self.to_init.send(("drop " + os.path.join(directory, "spec")).encode())
        self.spawn("b", [{"argv": ["sleep", "1000"]}])  # packets are read in order
        self.assertTrue(alive(hung))
        self.to_init.send(("drop " + spec).encode())
        wait_for(lambda: not alive(hung), "it is killed")
        self.spawn("c", [{"argv": ["sleep", "1000"]}])  # no answer about it came before this one's
        self.assertTrue(alive(answered))

    def test_stop_ends_daemons_sessions_and_deaf_trees(self):
        self.stop_a_tree("auto")

    def test_stop_ends_them_without_a_control_group(self):
        """Nothing but their parents tells whose they are: the supervisor has to be the one of those that lost theirs."""
        self.stop_a_tree("off")

    def stop_a_tree(self, cgroup):
        self.start_init(cgroup=cgroup)
        directory = os.path.join(self.dir, "a")
        script = (
            "cd %s; "
            "(setsid sh -c 'echo $$ > session; exec sleep 1000' &) ; "
            "(trap '' TERM; sh -c 'echo $$ > deaf; while :; do sleep 1; done' &) ; "
            "python3 -c 'import os\n"
            "if os.fork() == 0:\n"
            "  os.setsid()\n"
            "  if os.fork() == 0:\n"
            "    open(\"daemon.tmp\", \"w\").write(\"%%d\\n\" %% os.getpid())\n"
            "    os.rename(\"daemon.tmp\", \"daemon\")\n"
            "    import signal; signal.signal(15, signal.SIG_IGN)\n"
            "    while True: signal.pause()\n"
            "  os._exit(0)\n"
            "os.wait()'; "
            "echo $$ > main; sleep 1000; echo over") % directory
        _, supervisor = self.spawn("a", [{"argv": ["/bin/sh", "-c", script]}])
        pids = [read_number(os.path.join(directory, n)) for n in
                ("session", "deaf", "daemon", "main")]
        self.assertTrue(all(alive(p) for p in pids))
        self.assertIn(pids[2], [pid for pid, _ in children_of(supervisor)])
        s = Supervisor(directory)
        s.until("replayed")
        started = time.monotonic()
        s.send("stop 500 15")
        seen, _ = s.until("all-exited")
        self.assertIn("all-exited stop requested", seen[-1])
        self.assertGreaterEqual(time.monotonic() - started, 0.4)
        self.assertEqual([p for p in pids if alive(p)], [])
        self.assertEqual(children_of(supervisor), [])
        s.end()
        wait_for(lambda: not alive(supervisor), "the supervisor ends after release")

    def test_groups_that_a_job_made_go_with_its_own(self):
        if not self.has_group("auto"):
            self.skipTest("no control group can be made here")
        self.start_init()
        directory = os.path.join(self.dir, "a")
        script = ("cd %s; until test -s group; do sleep 0.02; done; read g < group; "
                  "for i in 1 2 3 4 5 6 7 8; do g=$g/deep; mkdir $g; done; echo 0 > $g/cgroup.procs; "
                  "trap '' TERM; echo $$ > main.new; mv main.new main; while :; do sleep 1; done") % directory
        _, supervisor = self.spawn("a", [{"argv": ["/bin/sh", "-c", script]}])
        kind, path = self.group_of(directory)
        with open(os.path.join(directory, "group.new"), "w") as f:
            f.write(path + "\n")
        os.rename(os.path.join(directory, "group.new"), os.path.join(directory, "group"))
        main = read_number(os.path.join(directory, "main"))
        self.assertTrue(os.path.isdir(path + 8 * "/deep"), kind)
        s = Supervisor(directory)
        s.until("replayed")
        s.send("stop 100 15")
        s.until("all-exited")
        self.assertFalse(alive(main))
        self.assertFalse(os.path.exists(path))
        s.end()
        wait_for(lambda: not alive(supervisor), "the supervisor ends after release")

    def test_leftovers_of_a_finished_child_are_ended(self):
        self.start_init()
        directory, _ = self.spawn("a", [{"argv": [
            "/bin/sh", "-c", "cd %s/a; setsid sh -c 'trap \"\" TERM; echo $$ > left; sleep 1000' & "
            "while ! test -s left; do sleep 0.01; done; exit 0" % self.dir]}])
        left = read_number(os.path.join(directory, "left"))
        s = Supervisor(directory)
        seen, _ = s.until("all-exited")
        self.assertIn("exit 0 0 0", seen)
        self.assertFalse(alive(left))
        s.end()

    def test_failed_child_ends_its_peers(self):
        self.start_init()
        directory, _ = self.spawn(
            "a", [{"argv": ["/bin/sh", "-c", "trap '' TERM; sleep 1000"]},
                  {"argv": ["/bin/sh", "-c", "exit 5"]}], end_peers_after_ms=100)
        s = Supervisor(directory)
        seen, _ = s.until("all-exited")
        self.assertEqual(seen[-1], "all-exited child 1 failed")
        self.assertIn("exit 0 0 9", seen)
        s.end()

    def test_agent_killed_children_go_on_and_a_new_agent_adopts(self):
        self.start_init()
        self.to_init.send(b"ready")
        child = ("import os, time\n"
                 "fd = int(os.environ['MOBULA_REPORT_FD'])\n"
                 "for i in range(200):\n"
                 "    print(i, flush=True)\n"
                 "    os.write(fd, b'%d\\n' % i)\n"
                 "    time.sleep(0.005)\n"
                 "print(os.read(fd, 16).decode(), flush=True)\n")
        directory, supervisor = self.spawn(
            "a", [{"argv": [sys.executable, "-c", child], "report": True}])
        first = Supervisor(directory)
        first.until("replayed")
        first.send("fds")
        _, fd = first.until("fd 0")
        got = b""
        while len(got.splitlines()) < 5:
            got += os.read(fd, 4096)
        os.kill(self.agent_pid, signal.SIGKILL)
        first.sock.close()
        os.close(fd)
        self.to_init.close()
        self.take_agent()  # restarted by init
        self.assertTrue(alive(supervisor))
        second = Supervisor(directory)
        seen, _ = second.until("replayed")
        self.assertTrue(any(t.startswith("started 0 ") for t in seen))
        second.send("fds")
        _, fd = second.until("fd 0")
        while not got.endswith(b"199\n"):
            got += os.read(fd, 4096)
        self.assertEqual(got, b"".join(b"%d\n" % i for i in range(200)))
        os.write(fd, b"durable")
        second.until("all-exited")
        with open(os.path.join(directory, "log0")) as f:
            self.assertEqual(f.read(), "".join("%d\n" % i for i in range(200)) + "durable\n")
        os.close(fd)
        second.end()
        wait_for(lambda: not alive(supervisor), "the supervisor ends after release")

    def test_events_wait_for_an_agent_that_is_away(self):
        self.start_init()
        directory, supervisor = self.spawn("a", [{"argv": [
            "/bin/sh", "-c", "printf last >&$MOBULA_REPORT_FD; exit 4"], "report": True}])
        wait_for(lambda: "all-exited" in self.state(directory), "all exited without an agent")
        self.assertTrue(alive(supervisor))
        s = Supervisor(directory)
        seen, _ = s.until("replayed")
        self.assertIn("exit 0 4 0", seen)
        s.send("fds")
        _, fd = s.until("fd 0")
        self.assertEqual(os.read(fd, 64), b"last")
        os.close(fd)
        s.end()
        wait_for(lambda: not alive(supervisor), "the supervisor ends after release")

    def test_init_killed_ends_everything(self):
        self.start_init()
        directory, supervisor = self.spawn("a", [{"argv": [
            "/bin/sh", "-c", "trap '' TERM; echo $$ > %s/a/main; while :; do sleep 1; done"
            % self.dir]}], stop_grace_ms=200)
        main = read_number(os.path.join(directory, "main"))
        agent = self.agent_pid
        self.init.kill()
        self.init.wait()
        for pid in (agent, main, supervisor):
            wait_for(lambda: not alive(pid), "process %d is gone" % pid)
        self.assertIn("all-exited init died", self.state(directory))

    def test_supervisor_killed_leaves_nothing(self):
        self.start_init()
        directory, supervisor = self.spawn("a", [{"argv": [
            "/bin/sh", "-c", "setsid sh -c 'echo $$ > %s/a/deep; sleep 1000' & echo $$ > %s/a/main; wait"
            % (self.dir, self.dir)]}])
        _, other = self.spawn("b", [{"argv": ["sleep", "1000"]}])
        pids = [read_number(os.path.join(directory, n)) for n in ("main", "deep")]
        os.kill(supervisor, signal.SIGKILL)
        for pid in pids:
            wait_for(lambda: not alive(pid), "process %d is gone" % pid)
        self.assertTrue(alive(other))
        self.assertTrue(alive(self.agent_pid))

    def test_init_and_supervisor_killed_together_leave_no_child(self):
        """Nobody of ours is left to kill it: the kernel does, for its parent died."""
        self.start_init()
        directory, supervisor = self.spawn("a", [{"argv": [
            "/bin/sh", "-c", "trap '' TERM; echo $$ > %s/a/main; while :; do sleep 1; done"
            % self.dir]}])
        main = read_number(os.path.join(directory, "main"))
        os.kill(self.init.pid, signal.SIGSTOP)  # it cannot act between the two
        os.kill(supervisor, signal.SIGKILL)
        os.kill(self.init.pid, signal.SIGKILL)
        self.init.wait()
        wait_for(lambda: not alive(main), "the child of both is gone")
        self.remove_groups(directory)

    def group_of(self, directory):
        """(kind, directory) of an attempt's control group; ("none", None) without one."""
        for line in self.state(directory).splitlines():
            if line.startswith("group "):
                return tuple(line.split(" ", 2)[1:])
        return "none", None

    def remove_groups(self, directory):
        kind, path = self.group_of(directory)
        if path is not None:
            wait_for(lambda: not os.path.exists(path) or try_rmdir(path), "the group is empty")

    # Each process has itself replaced by a child in a session of its own and ends, for ever.
    CHAIN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write("1\\n")
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
"""

    # Sixty processes that start each child again when it dies.
    REVIVERS = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def revive(depth):
    while depth:
        if os.fork() == 0:
            revive(depth - 1)
        if os.fork() == 0:
            revive(depth - 1)
        os.wait()
    signal.pause()
open(sys.argv[1], "w").write("1\\n")
revive(5)
"""

    def bomb(self, script, cgroup):
        self.start_init(cgroup=cgroup)
        directory = os.path.join(self.dir, "a")
        directory, supervisor = self.spawn("a", [{"argv": [
            sys.executable, "-c", script, os.path.join(directory, "up")]}],
            leftover_grace_ms=600000)
        kind, path = self.group_of(directory)
        s = Supervisor(directory)
        read_number(os.path.join(directory, "up"))
        s.send("stop 50 15")
        s.until("all-exited")
        self.assertEqual([p for p, _ in children_of(supervisor)], [])
        proof = "wait" if kind == "none" else "wait+" + kind
        self.assertIn("left 0 %s\nall-exited stop requested" % proof, self.state(directory))
        if path is not None:
            self.assertFalse(os.path.exists(path))
        s.end()
        return kind

    def test_fork_bombs_do_not_survive_a_stop(self):
        """ray#42861: what a job leaves behind keeps its GPU. Every way that this machine has."""
        ran = []
        for cgroup in ("auto", "v1", "off"):
            for script in (self.CHAIN, self.REVIVERS):
                if cgroup == "off" and script is self.CHAIN:
                    continue  # faster than a scan of /proc: only a control group ends it
                with self.subTest(cgroup=cgroup):
                    kind = self.bomb(script, cgroup) if cgroup == "off" or self.has_group(
                        cgroup) else None
                    ran.append((cgroup, kind))
                if self.init is not None:
                    self.init.send_signal(signal.SIGTERM)
                    self.init.wait(DEADLINE_S)
                    shutil.rmtree(os.path.join(self.dir, "a"))
                    self.init = None
        print("control groups tried:", ran, file=sys.stderr)

    @staticmethod
    def has_group(cgroup):
        """May this process make a group of that kind?"""
        root = "/sys/fs/cgroup"
        places = ["%s/freezer" % root] if cgroup == "v1" else [root, "%s/unified" % root]
        for place in places:
            probe = os.path.join(place, "mobula-probe-%d" % os.getpid())
            marker = "freezer.state" if cgroup == "v1" else "cgroup.kill"
            try:
                os.mkdir(probe)
            except OSError:
                continue
            fits = os.path.exists(os.path.join(probe, marker))
            os.rmdir(probe)
            if fits:
                return True
        return False

    def test_memory_limit_kills_the_tree_and_says_so(self):
        """The memory of all together counts; what they share counts once."""
        script = (
            "import mmap, os, time\n"
            "shared = mmap.mmap(-1, 24 << 20)\n"
            "shared.write(bytes(24 << 20))\n"
            "for i in range(3):\n"
            "    if os.fork() == 0:\n"
            "        sum(shared[at] for at in range(0, 24 << 20, 4096))\n"
            "        open('%s/a/up%%d' %% i, 'w').write('1\\n')\n"
            "        while not os.path.exists('%s/a/grow'): time.sleep(0.01)\n"
            "        mine = bytearray(b'x') * (40 << 20)\n"
            "        time.sleep(1000)\n"
            "os.wait()\n" % (self.dir, self.dir))
        self.start_init()
        directory, _ = self.spawn("a", [{"argv": [sys.executable, "-c", script]}],
                                  memory_limit_bytes=96 << 20)
        s = Supervisor(directory)
        for i in range(3):
            read_number(os.path.join(directory, "up%d" % i))
        open(os.path.join(directory, "grow"), "w").close()
        seen, _ = s.until("all-exited")
        self.assertEqual(seen[-1], "all-exited killed: memory limit of 96 MiB")
        self.assertIn("exit 0 0 9", seen)
        s.end()

    # ---- a control group of v2 that init may divide ----

    def own_group(self):
        """A new group below the root, which hands the memory controller to it; and it is the kernel
        that says so: a directory that can be made is no proof."""
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            group = os.path.join(root, "mobula-test-%d" % os.getpid())
            try:
                os.mkdir(group)
            except OSError:
                continue
            if os.path.exists(os.path.join(group, "memory.max")):
                self.addCleanup(lambda: wait_for(lambda: try_rmdir(group), "nothing is left in " + group))
                return group
            os.rmdir(group)
        self.skipTest("no control group of v2 with the memory controller can be made here")

    @staticmethod
    def place_of(pid):
        """The path of a process in the hierarchy of v2, from the root's."""
        with open("/proc/%d/cgroup" % pid) as f:
            return next(line.split("::", 1)[1].strip() for line in f if line.startswith("0::"))

    # What it holds is touched, so that it is resident.
    GREEDY = "import time; up = open(%r, 'w'); up.write('1\\n'); up.close(); hold = b'x' * (256 << 20); time.sleep(1000)"

    def run_greedy(self, limit_bytes):
        directory = os.path.join(self.dir, "a")
        self.spawn("a", [{"argv": [sys.executable, "-c", self.GREEDY % os.path.join(directory, "up")]},
                         {"argv": ["sleep", "1000"]}], memory_limit_bytes=limit_bytes)
        kind, path = self.group_of(directory)
        self.assertEqual(kind, "cgroup-v2")
        s = Supervisor(directory)
        limit = None
        if os.path.exists(os.path.join(path, "memory.max")):
            with open(os.path.join(path, "memory.max")) as f:
                limit = f.read().strip()
        seen, _ = s.until("all-exited")
        self.assertEqual(seen[-1], "all-exited killed: memory limit of %d MiB" % (limit_bytes >> 20))
        self.assertEqual([m for m in seen if m.startswith("exit ")].count("exit 0 0 9"), 1, seen)
        self.assertFalse(os.path.exists(path))
        s.end()
        return path, limit

    def test_alone_in_its_group_it_has_the_kernel_keep_the_limit(self):
        group = self.own_group()
        self.start_init(group=group)
        name = "/" + os.path.basename(group)
        for pid in (self.init.pid, self.agent_pid):
            self.assertEqual(self.place_of(pid), name + "/mobula-init")
        path, limit = self.run_greedy(64 << 20)
        self.assertEqual(os.path.dirname(path), group)
        self.assertEqual(limit, str(64 << 20))
        print("memory.max was kept by the kernel", file=sys.stderr)
        self.init.send_signal(signal.SIGTERM)
        self.init.wait(DEADLINE_S)
        self.assertEqual(os.listdir(group), [f for f in os.listdir(group) if "mobula" not in f])
        with open(os.path.join(group, "cgroup.subtree_control")) as f:
            self.assertEqual(f.read().strip(), "")

    def test_in_a_group_of_others_it_stays_and_measures(self):
        group = self.own_group()
        other = subprocess.Popen(["sleep", "1000"])
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        with open(os.path.join(group, "cgroup.procs"), "w") as f:
            f.write(str(other.pid))
        self.start_init(group=group)
        self.assertEqual(self.place_of(self.init.pid), "/" + os.path.basename(group))
        self.assertEqual(self.place_of(other.pid), "/" + os.path.basename(group))
        self.assertIsNone(self.run_greedy(64 << 20)[1])

    def test_a_second_start_in_a_leaf_that_was_left(self):
        """SIGKILL of init leaves the leaf; whoever is put there begins as if alone."""
        group = self.own_group()
        self.start_init(group=group)
        os.kill(self.init.pid, signal.SIGKILL)
        self.init.wait(DEADLINE_S)
        wait_for(lambda: not alive(self.agent_pid), "its agent ends")
        self.start_init(group=os.path.join(group, "mobula-init"))
        self.assertEqual(self.run_greedy(64 << 20)[1], str(64 << 20))

    def test_limits_of_files_and_no_core(self):
        self.start_init()
        directory, _ = self.spawn("a", [{"argv": ["/bin/sh", "-c", "ulimit -n; ulimit -c"]}],
                                  nofile=77)
        s = Supervisor(directory)
        s.until("all-exited")
        with open(os.path.join(directory, "log0")) as f:
            self.assertEqual(f.read(), "77\n0\n")
        s.end()

    def test_term_ends_agent_then_supervisors(self):
        self.start_init()
        directory, supervisor = self.spawn("a", [{"argv": ["sleep", "1000"]}])
        self.init.send_signal(signal.SIGTERM)
        self.assertEqual(self.init.wait(DEADLINE_S), 128 + signal.SIGTERM)
        self.assertFalse(alive(supervisor))
        self.assertFalse(alive(self.agent_pid))
        self.assertIn("all-exited supervisor was told to end", self.state(directory))
        self.assertFalse(os.path.exists(os.path.join(self.dir, "init.pid")))

    def test_supervisors_that_are_killed_at_the_end_leave_no_socket(self):
        self.start_init(grace_ms=100)
        listening = []
        for name in "ab":
            directory, supervisor = self.spawn(name, [{"argv": [
                "/bin/sh", "-c", "trap '' TERM; echo $$ > %s/%s/main; while :; do sleep 1; done"
                % (self.dir, name)]}], stop_grace_ms=1000 * int(DEADLINE_S))
            main = read_number(os.path.join(directory, "main"))
            listening.append((os.path.join(directory, "s"), supervisor, main))
        self.assertTrue(all(os.path.exists(path) for path, _, _ in listening))
        self.init.send_signal(signal.SIGTERM)
        self.init.wait(DEADLINE_S)
        for path, supervisor, main in listening:
            self.assertFalse(alive(supervisor) or alive(main))
            self.assertFalse(os.path.exists(path))

    # As AGENT, but it says when it is told to end, and goes on.
    DEAF_AGENT = r"""
import array, os, signal, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
crashes_at, heard = 0, 0

def hear(*_):
    global heard
    heard += 1
    if heard == crashes_at:
        os.kill(os.getpid(), signal.SIGKILL)
    sock.send(b"told")

signal.signal(signal.SIGTERM, hear)
fd = int(os.environ["MOBULA_INIT_FD"])
sock.sendmsg([b"%d" % os.getpid()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
if sock.recv(64) == b"signals":  # one sent before this must not have ended us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
order = sock.recv(64)
os._exit(int(order) if order else 0)
"""

    def hear_told(self):
        self.agent.settimeout(DEADLINE_S)
        self.agent.send(b"signals")
        self.assertEqual(self.agent.recv(4), b"told")

    def test_agent_that_crashes_while_it_stops_is_started_again(self):
        self.AGENT = self.DEAF_AGENT
        self.start_init(grace_ms=int(DEADLINE_S) * 1000)
        directory, supervisor = self.spawn("a", [{"argv": ["sleep", "1000"]}])
        self.to_init.send(b"ready")
        self.init.send_signal(signal.SIGTERM)
        self.hear_told()
        for _ in range(2):
            os.kill(self.agent_pid, signal.SIGKILL)
            self.take_agent()
            self.assertTrue(alive(supervisor))
            self.hear_told()
            self.to_init.send(("spawn " + os.path.join(directory, "spec")).encode())
            self.assertIn("the node is stopping", self.to_init.recv(8192).decode())
        self.agent.send(b"0")
        self.assertEqual(self.init.wait(DEADLINE_S), 0)
        self.assertFalse(alive(supervisor))

    def test_agent_that_crashes_just_before_a_stop_is_started_again(self):
        self.AGENT = self.DEAF_AGENT
        self.start_init(grace_ms=int(DEADLINE_S) * 1000)
        self.to_init.send(b"ready")
        self.init.send_signal(signal.SIGSTOP)
        os.kill(self.agent_pid, signal.SIGKILL)
        self.init.send_signal(signal.SIGTERM)
        self.init.send_signal(signal.SIGCONT)
        self.take_agent()
        self.hear_told()
        self.agent.send(b"0")
        self.assertEqual(self.init.wait(DEADLINE_S), 0)

    def test_agent_that_crashes_after_its_grace_is_not_started_again(self):
        # By itself, at the second signal: who kills it from here has no more than the moment that init leaves it.
        self.AGENT = self.DEAF_AGENT.replace("crashes_at, heard = 0, 0", "crashes_at, heard = 2, 0")
        self.start_init(grace_ms=2000)  # time to hear of the first signal before the second comes: two that wait are one
        self.to_init.send(b"ready")
        self.init.send_signal(signal.SIGTERM)
        self.hear_told()
        self.assertEqual(self.agent.recv(4), b"")
        self.assertEqual(self.init.wait(DEADLINE_S), 128 + signal.SIGKILL)
        self.listener.setblocking(False)
        self.assertRaises(BlockingIOError, self.listener.accept)

    SAVING = ("trap 'trap \"\" TERM; echo 1 > %s/termed; sleep 1; echo 1 > %s/saved; exit 0' TERM; "
              "echo 1 > %s/up; sleep 1000 & wait")

    def spawn_saving(self):
        directory = os.path.join(self.dir, "a")
        self.spawn("a", [{"argv": ["/bin/sh", "-c", self.SAVING % ((directory,) * 3)]}],
                   stop_grace_ms=20000)
        read_number(os.path.join(directory, "up"))
        return directory

    def test_term_after_a_stop_leaves_its_grace(self):
        self.start_init()
        directory = self.spawn_saving()
        s = Supervisor(directory)
        self.addCleanup(s.sock.close)
        s.send("stop 20000 %d" % signal.SIGTERM)
        read_number(os.path.join(directory, "termed"))
        self.init.send_signal(signal.SIGTERM)  # it ends the agent, then the supervisor
        self.init.wait(DEADLINE_S)
        self.assertTrue(os.path.exists(os.path.join(directory, "saved")), self.state(directory))

    def test_grace_comes_with_the_signal(self):
        self.start_init(grace_ms=100)
        directory = self.spawn_saving()
        libc = ctypes.CDLL(None, use_errno=True)
        self.assertEqual(libc.sigqueue(self.init.pid, signal.SIGTERM, ctypes.c_void_p(20000)), 0)
        self.init.wait(DEADLINE_S)
        self.assertTrue(os.path.exists(os.path.join(directory, "saved")), self.state(directory))

    def test_bad_argument_status_is_passed_on_and_crash_is_not(self):
        self.start_init()
        self.agent.send(b"1")
        self.to_init.close()
        self.take_agent()  # status 1 is a crash: started again
        self.agent.send(b"64")
        self.assertEqual(self.init.wait(DEADLINE_S), 64)

    def test_program_that_is_not_there(self):
        done = subprocess.run([INIT, "agent", "--run-dir", self.dir, "--", "/nonexistent/agent"],
                              stderr=subprocess.PIPE, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 66)
        self.assertIn(b"/nonexistent/agent", done.stderr)

    def test_bad_spec_is_refused_with_its_reason(self):
        self.start_init()
        self.to_init.send(b"spawn /nonexistent/spec")
        reply = self.to_init.recv(8192).decode()
        self.assertTrue(reply.startswith("error /nonexistent/spec\n"), reply)
        self.assertIn("No such file", reply)


if __name__ == "__main__":
    unittest.main()

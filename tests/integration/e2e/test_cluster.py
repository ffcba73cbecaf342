"""The end of a cluster is clean: what the other tests rely on, tried with leftovers of our own."""

import os
import socket
import subprocess
import sys
import unittest

from cluster import NoCluster, is_left_listening, wait_until

LISTEN = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"


def listener(**env):
    """A process that listens, and its port; env: None takes a name away."""
    full = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    process = subprocess.Popen([sys.executable, "-c", LISTEN], env=full, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


class LeftListening(unittest.TestCase):
    def left(self, **env):
        process, port = listener(**env)
        with process:
            answer = is_left_listening(port)
            process.stdin.close()
        self.assertFalse(is_left_listening(port), "it has ended")
        return answer

    def test_one_of_ours(self):
        self.assertTrue(self.left())

    def test_one_that_lost_its_environment(self):
        self.assertTrue(self.left(MB_TEST_RUN=None))

    def test_one_of_another_run(self):
        self.assertFalse(self.left(MB_TEST_RUN="another"))

    def test_a_port_that_two_runs_share(self):
        """A child of another run that has our socket does not hide it."""
        with socket.create_server(("127.0.0.1", 0)) as ours:
            with subprocess.Popen(["sleep", "100"], pass_fds=[ours.fileno()],
                                  env={**os.environ, "MB_TEST_RUN": "another"}) as child:
                self.assertTrue(is_left_listening(ours.getsockname()[1]))
                child.kill()

    def test_it_fails_the_cluster(self):
        process, port = listener()
        with process:
            with self.assertRaisesRegex(AssertionError, f"ports still answer: .*{port}"):
                with NoCluster() as cluster:
                    cluster._ports.add(port)
            process.stdin.close()
        wait_until(lambda: process.poll() is not None, "it ends", 5)


if __name__ == "__main__":
    unittest.main()

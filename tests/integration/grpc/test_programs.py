"""The programs as they are built: with gRPC in them, or with its library; never with both.

test_programs.py archive|library PROGRAM..."""
import subprocess
import sys
import unittest

FROM, PROGRAMS = sys.argv[1], sys.argv[2:]
SWITCH = "SetMutexDeadlockDetectionMode"  # base/grpc/grpc.c looks it up; what calls cost depends on it


def tells(*argv):
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout


class Programs(unittest.TestCase):
    def test_grpc_is_there_once(self):
        for program in PROGRAMS:
            needed = [line for line in tells("readelf", "-dW", program).splitlines() if "NEEDED" in line]
            self.assertEqual(any("libgrpc" in line or "libgpr" in line or "libabsl" in line for line in needed), FROM == "library", needed)
            self.assertEqual("grpc_channel_create_call" in tells("nm", "--defined-only", program), FROM == "archive")
            if FROM == "archive":
                self.assertIn(SWITCH, tells("nm", "-D", "--defined-only", program))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

"""`mobula run` around megatron-core on the CPU."""

import unittest

from torch_case import HERE, TorchCase


class MegatronCoreTest(TorchCase):
    def test_gpt_with_tensor_parallel_size_2(self):
        self.check(HERE / "mcore.py", 40, 15)


if __name__ == "__main__":
    unittest.main()

"""`mobula run` around a torch.distributed program."""

import unittest

from torch_case import HERE, TorchCase


class DdpTest(TorchCase):
    def test_ddp_on_gloo(self):
        self.check(HERE / "ddp.py", 50, 25)


if __name__ == "__main__":
    unittest.main()

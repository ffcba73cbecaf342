"""Against an older megatron-core, 0.13: its distributed optimizer's forms in --ckpt-format torch_dist become whole tensors, which
torch's own Adam has, too. Usage: test_megatron_old.py WORKER MOBULA"""

import dataclasses
import unittest

import numpy
import torch
import megatron.core
from megatron.core import optimizer
from megatron.core.dist_checkpointing.strategies import filesystem_async

# What it wants of an older numpy, and what the newer has that this one did without.
numpy.product = numpy.prod
make = optimizer.get_megatron_optimizer
optimizer.get_standard_config_overrides = lambda how: None
optimizer.get_megatron_optimizer = lambda how, models, overrides: make(how, models)

import megatron_train
from megatron_gang import Shape
from megatron_train import LayoutCase

FORMS = ("fully_sharded_model_space", "dp_zero_gather_scatter")


def layout_main(*args):
    filesystem_async._results_queue = torch.multiprocessing.get_context("fork").Queue()  # it saves in a process of its own
    megatron_train.layout_main(*args)


class LayoutTest(LayoutCase):
    main = staticmethod(layout_main)

    def forms(self, s):
        self.assertTrue(megatron.core.__version__.startswith("0.13."), megatron.core.__version__)
        for zero in FORMS:
            with self.subTest(zero):
                self.fresh()
                self.check(dataclasses.replace(s, zero=zero, dist=True), torch.bfloat16)

    def test_gates_and_query_groups(self):
        self.forms(Shape(tp=2, dp=2, llama=True, untied=True))

    def test_stages_biases_and_tied_embeddings(self):
        self.forms(Shape(tp=2, pp=2))


if __name__ == "__main__":
    unittest.main()

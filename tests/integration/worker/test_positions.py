"""--reset-position-ids: the same numbers whatever the layout, others than without. Usage: test_positions.py WORKER"""

import unittest

from gang import losses
from layouts import LayoutCase, length, split

RESET = "--reset-position-ids"


class Positions(LayoutCase):
    MODEL = ["--num-layers", "4", *length(32), "--global-batch-size", "8"]

    def test_layouts(self):
        for world, layout in ((2, []), (2, split(tensor=2)), (2, split(pipeline=2)), (4, split(pipeline=2, chunks=2)),
                              (2, split(context=2)), (4, split("--sequence-parallel", tensor=2, context=2))):
            self.check_layout(world, layout, (RESET,), "positions that begin anew")

    def test_it_shows(self):
        a, b = losses(self.alone(RESET)), losses(self.alone())
        self.assertTrue(all(a[i] != b[i] for i in a))

    def test_others_than_learned_positions_do_not(self):
        for kind in ("rope", "none"):
            words = ("--position-embedding-type", kind)
            gang = self.alone(*words, RESET)
            self.assertIn("note: --reset-position-ids has no effect without learned positions", gang.ranks[0].log())
            self.assertEqual(losses(gang), losses(self.alone(*words)))


if __name__ == "__main__":
    unittest.main()

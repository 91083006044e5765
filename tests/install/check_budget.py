#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The judgement of tools/check_cuda_budget.py on machine code: a kernel that starts early and touches memory before
it waits is found."""
import unittest

import check_cuda_budget

WAIT = "ACQBULK"
HARMLESS = ["LDC R1, c[0x0][0x28]", "ULDC.64 UR4, c[0x0][0x208]", "S2R R0, SR_TID.X", "LDS R2, [R3]",
            "@!P1 CCTL.E.PF2 [R2]", "PREEXIT"]


class Early(unittest.TestCase):
    def test_nothing_is_touched_before_the_wait(self):
        for early in ("LDG.E.128 R4, desc[UR4][R2.64]", "@P0 LD.E R4, desc[UR4][R2.64]", "@!P0 EXIT",
                      "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]", "ATOMG.E.ADD.STRONG.GPU PT, R3, desc[UR4][R2.64], R3"):
            self.assertEqual(check_cuda_budget.touches_early(HARMLESS + [early, WAIT]), early)
            self.assertIsNone(check_cuda_budget.touches_early(HARMLESS + [WAIT, early]))
            self.assertIsNone(check_cuda_budget.touches_early([early])) # it does not wait, nor start early


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The numbers in docs/moves.svg are the defaults of the library and its plan for that cache."""
import sys

import draw_moves
import kvferry

defaults = {setting.name: setting.default for setting in kvferry.settings()}
held = {name: int(defaults[name]) for name in draw_moves.SETTINGS}
with kvferry.Runtime(device="host") as runtime:
    plan = kvferry.Cache.plan_for(runtime, **draw_moves.CACHE)
held.update((name, getattr(plan, name)) for name in draw_moves.PLAN)

told = dict(draw_moves.SETTINGS, **draw_moves.PLAN)
wrong = ["%s is %d, not %d" % (name, held[name], told[name])
         for name in told if told[name] != held[name]]
if wrong:
    sys.exit("docs/draw_moves.py: " + "; ".join(wrong))

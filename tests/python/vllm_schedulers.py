# SPDX-License-Identifier: Apache-2.0
"""A scheduler for --scheduler-cls, as others write them."""
from vllm.v1.core.sched.scheduler import Scheduler


class Turning(Scheduler):
    """Turns the order of requests that run round in every pass: the newest come first, and the oldest lose their blocks."""

    def schedule(self, *given, **named):
        self.running.reverse()
        return super().schedule(*given, **named)

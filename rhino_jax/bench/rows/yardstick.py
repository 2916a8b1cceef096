"""Current speed of the machine, so that tables of different hours are comparable.

Times of planning are those of Python and NumPy on one core, which on shared machines
differ by a factor of two from one hour to the next.
"""

from __future__ import annotations

import time


ADDITIONS = 10_000_000
"""Number of additions of the timed loop."""


def yardstick_s() -> float:
    """Return the CPU seconds of `ADDITIONS` additions in a Python loop."""
    started = time.process_time()
    total = 0
    for i in range(ADDITIONS):
        total += i
    return time.process_time() - started

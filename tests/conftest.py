"""Eight emulated devices for every test, and which tests a run holds.

Which test goes where. A test stands in the folder of the package that it checks, and
checks at the cheapest place: a rule by evaluating shards in NumPy, a rewrite by
interpreting both programs, a schedule by its clock, a plan without running it; it
compiles where compiling is the point, on the smallest model that shows it. A test of
more than `LONG_S` seconds (`tests.turns`) is marked `slow`. Of a matrix (model, mesh,
option, seed of a random program) the cases that between them reach every part stay in
the short run, and the rest are slow (`tests.cases.covering`). `pytest` runs all that is
not slow, and so does README's test command, within six minutes; `pytest tests/NAME`
takes at most one.
Slow tests take turns in CI: `--turn 2/3` keeps every third of them, from the second on.
Name a slow test ("tests/a/test_b.py::test_c"), or write `-m slow`, to run it. Marks
say what else a test needs: `processes` starts several at once, `compile_only` the
compilers of TPU and GPU, `browser` Chromium.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest


pytest_plugins = ["tests.turns"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Plans are computed, not read from the user's cache, which is left alone.
os.environ["RHINO_CACHE"] = "0"
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # LLVM's passes take half of XLA:CPU's time to compile, and change no HLO.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
for _flag in _FLAGS:
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

# Python's own thresholds take a tenth of the time: what JAX caches is not garbage.
gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """With RHINO_REQUIRE_EXTRAS=1, no test of the extras may be skipped."""
    report = yield
    is_required = os.environ.get("RHINO_REQUIRE_EXTRAS") == "1"
    is_of_extra = any(map(item.get_closest_marker, ("compile_only", "browser")))
    if is_required and report.skipped and is_of_extra:
        report.outcome = "failed"
        report.longrepr = f"skipped, but RHINO_REQUIRE_EXTRAS=1: {report.longrepr}"
    return report

"""Eight emulated CPU devices and quick compiling, set before JAX starts its backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests plan anew, and leave the user's cache alone.
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

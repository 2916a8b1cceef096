"""The environment of Python processes that this one starts to plan or compile."""

from __future__ import annotations

import os
from pathlib import Path


def environment_of_child() -> dict[str, str]:
    """This process's, such that the child finds this package, and starts on CPU.

    Targets are planned and compiled for, not run on: devices stay with this process.
    """
    found = dict(os.environ)
    home = str(Path(__file__).resolve().parents[1])
    paths = [home, *filter(None, [found.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["JAX_PLATFORMS"] = "cpu"
    return found

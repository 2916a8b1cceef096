"""Children import this package wherever they start."""

from __future__ import annotations

import os
from pathlib import Path

from rhino_jax.utils.subprocess import environment_of_child
from rhino_jax.verify.hlo import module


def test_children_find_the_package() -> None:
    first, *_ = environment_of_child()["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "rhino_jax" / "utils" / "subprocess.py").is_file()


def test_lines_that_apply_plans_are_of_a_folder_that_is_there() -> None:
    assert (Path(module._RUNTIME) / "interpret.py").is_file()

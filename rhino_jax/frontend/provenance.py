"""Provenance of equations: the user's source line, the name stack.

A notebook's kernel compiles every cell under a file name of its own, such as
`/tmp/ipykernel_4242/1825377899.py`, which means nothing to the cell's author: its lines
are reported as `In[7]:39`.
"""

from __future__ import annotations

import functools
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from rhino_jax._compat import user_frames
from rhino_jax.ir.program import Source


def cell_of(file: str) -> str:
    """Return the notebook cell that was compiled under a file name; the name itself for
    others.

    Cells are those of the running notebook, by the number of their last run. IPython is
    only queried where it is loaded.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # IPython names cells this way since version 8.
    ask = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if ask is None else ask(file)
    return file if found is None else str(found[1])


LIBRARIES = """
chex distrax einops equinox flax haiku jaxopt jaxtyping lineax optax optimistix penzai
rlax
""".split()
"""Installed packages that are skipped in favour of the line that called them."""


NOWHERE = Source()
_PACKAGE = Path(__file__).resolve().parents[1]


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Whether a file belongs to a library that sits between the user and JAX."""
    folders = file.replace("\\", "/").split("/")
    if "site-packages" not in folders:
        return False
    return folders[folders.index("site-packages") + 1] in LIBRARIES


def source_of(source_info: Any, outer: Source = NOWHERE) -> Source:
    """Return the user's source line of an equation.

    Args:
      source_info: of the equation.
      outer: source of the equation whose region contains it.

    Returns:
      The innermost frame outside JAX and `LIBRARIES`; where there is none (code that a
      library traced before), the outer equation's; failing that, the innermost frame
      outside JAX.
    """
    parts = (outer.name_stack, str(source_info.name_stack))
    stack = "/".join(part for part in parts if part)
    first: tuple[str, int, str] | None = None
    for frame in user_frames(source_info):
        if not is_library_file(frame[0]):
            return _source(frame, stack)
        first = first or frame
    if outer.file or first is None:
        return replace(outer, name_stack=stack)
    return _source(first, stack)


def _source(frame: tuple[str, int, str], stack: str) -> Source:
    file, line, function = frame
    return Source(cell_of(file), line, function.rsplit("<locals>.", 1)[-1], stack)


def raised_at(error: BaseException) -> str:
    """Return the user's line that raised an error, as `model.py:61 (loss)`; empty
    without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and _PACKAGE not in path.parents:
            return str(_source((frame.filename, frame.lineno or 0, frame.name), ""))
    return ""

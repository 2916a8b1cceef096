"""Python's search for cycles of objects, put off while many are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Planning builds many objects and hardly a cycle of them. Python would look for
    such cycles in all of them again and again: a fifth of the time of GPT-3 175B."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Cells of a notebook: their lines are said as `In[7]:39`.

A kernel compiles every cell under a file name of its own, such as
`/tmp/ipykernel_4242/1825377899.py`, which says nothing to the cell's author.
"""

from __future__ import annotations

import sys


def cell_of(file: str) -> str:
    """The cell that a kernel compiled under a file name; of others the name itself.

    Cells are those of the notebook that runs now, by the number of their last run.
    IPython is only asked where it is loaded.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Cells are named so since IPython 8.
    ask = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if ask is None else ask(file)
    return file if found is None else str(found[1])

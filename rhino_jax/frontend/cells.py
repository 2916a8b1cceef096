"""Notebook cells: source lines in a cell are reported as `In[7]:39`.

A kernel compiles every cell under a file name of its own, such as
`/tmp/ipykernel_4242/1825377899.py`, which means nothing to the cell's author.
"""

from __future__ import annotations

import sys


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

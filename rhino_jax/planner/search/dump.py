"""Text dumps of every intermediate form between a program and its plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.planner.search.passes import TRACE, Pass


class Dump:
    """Write the result of each pass to a file of its own, such as `03_price.txt`.

    Files are numbered in the order in which the passes ran. Those of an earlier run are
    overwritten where they have the same name, and nothing else is touched.

    Attributes:
      folder: the folder of the files; created if missing, but not its parents.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        """Create the folder.

        Args:
          folder: path of the folder.
          what: the public call, for messages.
        Raises:
          RhinoError: the folder cannot be created.
        """
        self.folder = Path(folder)
        self._what = what
        self._count = 0
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._failed(self.folder, error) from error

    @classmethod
    def of_traced(
        cls, folder: str | os.PathLike[str], traced: Traced, what: str
    ) -> Dump:
        """Return a dump that has written the traced program already."""
        found = cls(folder, what)
        found(TRACE, traced)
        return found

    def __call__(self, step: Pass[..., Any], form: Any) -> None:
        path = self.folder / f"{self._count:02}_{step.name.replace(' ', '_')}.txt"
        self._count += 1
        try:
            path.write_text(step.text(form) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._failed(path, error) from error

    def _failed(self, path: Path, error: OSError) -> RhinoError:
        return RhinoError(
            f"{self._what}: what the passes give cannot be written.",
            where="dump=",
            numbers=f"{path}: {error.strerror}",
            fix="give a folder that can be written to.",
        )

"""The folder of a benchmark, from which a stopped run continues.

results/CELL.json  a result, written as soon as it is available; -plan: of planning
SUITE.json         all results of a suite, and its figures, written at the end
SUITE.md           the same as a report
plans/CELL.json    a plan
compiled/          each compiled program, by the hash of what it was compiled from
logs/              job and output of each child process
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import rhino_jax
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.records import Result
from rhino_jax.utils.atomic_write import write_file
from rhino_jax.utils.codec import from_json, to_json


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """Folder of a benchmark.

    Attributes:
      folder: the folder to which everything is written.
      is_fresh: whether earlier results do not count.
    """

    folder: Path
    is_fresh: bool = False

    @classmethod
    def open(cls, folder: str | Path, *, is_fresh: bool = False) -> Store:
        """Create the folder, if it does not exist.

        Args:
          folder: the folder.
          is_fresh: see `Store`.

        Raises:
          BenchError: it cannot be written, or is inside of the package.
        """
        path = Path(folder).expanduser().resolve()
        package = Path(rhino_jax.__file__).resolve().parent
        if path == package or package in path.parents:
            raise BenchError(
                "`bench`: results are not written into the package.",
                where=str(path),
                fix="give another folder: --out rhino_bench.",
            )
        try:
            for name in ("results", "plans", "compiled", "logs"):
                (path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(
                f"`bench`: the results cannot be written: {error.strerror}.",
                where=str(path),
                fix="give a folder that can be written: --out FOLDER.",
            ) from None
        return cls(path, is_fresh)

    def log(self, key: str) -> Path:
        return self.folder / "logs" / f"{key}.log"

    def plan_file(self, key: str) -> Path:
        """Return the file of a cell's plan."""
        return self.folder / "plans" / f"{key}.json"

    def saved(self, key: str, kind: type[T], made_with: Mapping[str, Any]) -> T | None:
        """Return a saved result; None if it has to be computed (again).

        Args:
          key: name of the result.
          kind: its type.
          made_with: what it depends on, such as versions.
        """
        if self.is_fresh:
            return None
        values = read_json(self.folder / "results" / f"{key}.json")
        try:
            if values["made_with"] == to_json(made_with):
                return from_json(kind, values["value"])
        except (KeyError, TypeError, ValueError):
            pass
        return None

    def save(self, key: str, value: Any, made_with: Mapping[str, Any]) -> None:
        """Save a result, with what it depends on."""
        path = self.folder / "results" / f"{key}.json"
        write_json(path, {"made_with": made_with, "value": value})


def write_json(path: Path, values: Any) -> None:
    """Write records and containers of them to a JSON file, atomically."""
    text = json.dumps(to_json(values), indent=1, ensure_ascii=False)
    write_file("`bench`", path, text + "\n")


def read_results(file: str, what: str) -> tuple[Result, ...]:
    """Return the results that `bench` wrote; see `read_earlier`."""
    of, fix = (
        "a benchmark that compiles",
        "run `bench full`, give rhino_bench/full.json",
    )
    return read_earlier(file, "results", tuple[Result, ...], what, of, fix)


def read_earlier(file: str, key: str, kind: type[T], what: str, of: str, fix: str) -> T:
    """Return the results of an earlier run.

    Args:
      file: its JSON file.
      key: the key of the results there.
      kind: their type.
      what: the command that reads them; `of`, `fix`: for errors.

    Raises:
      BenchError: the file contains no results.
    """
    values = read_json(Path(file))
    try:
        if values is None:
            raise ValueError("it is not there, or no JSON")
        return from_json(kind, values[key])
    except (KeyError, TypeError, ValueError) as error:
        what = f"{what}: the file holds no results of {of}."
        raise BenchError(what, where=file, numbers=str(error), fix=f"{fix}.") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

"""The folder of a benchmark, from which a stopped run continues.

SUITE.jsonl        one result per line, written as soon as it is available
SUITE.json         all results of a suite, and its figures, written at the end
SUITE.md           the same as a report
plans/ROW/         the plans of a row
rows/KIND/         results of rows that are measured as a whole
compiled/          each compiled program, by the hash of what it was compiled from
logs/              job, output and result of each child process
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rhino_jax
from rhino_jax.bench.errors import BenchError
from rhino_jax.bench.records import FINAL, CellOutcome, Result, file_name
from rhino_jax.plan.files.store import save_plan
from rhino_jax.plan.plan import PlanData
from rhino_jax.utils.atomic_write import write_file
from rhino_jax.utils.codec import from_json, to_json


PLANS = "planned.json"
"""Name of the list of a row's plans, in their folder."""


@dataclass(frozen=True, slots=True)
class Store:
    """Folder of one suite.

    Attributes:
      folder: the folder to which everything is written.
      suite: the suite's name.
    """

    folder: Path
    suite: str

    @classmethod
    def open(cls, folder: str | Path, suite: str, *, is_fresh: bool = False) -> Store:
        """Create the folder, if it does not exist.

        Args:
          folder: the folder.
          suite: the suite's name.
          is_fresh: whether to discard the suite's results.

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
        store = cls(path, suite)
        try:
            for name in ("plans", "compiled", "logs"):
                (path / name).mkdir(parents=True, exist_ok=True)
            if is_fresh:
                store.lines.unlink(missing_ok=True)
            _drop_half_line(store.lines)
        except OSError as error:
            raise BenchError(
                f"`bench`: the results cannot be written: {error.strerror}.",
                where=str(path),
                fix="give a folder that can be written: --out FOLDER.",
            ) from None
        return store

    @property
    def lines(self) -> Path:
        return self.folder / f"{self.suite}.jsonl"

    def log(self, key: str) -> Path:
        return self.folder / "logs" / f"{key}.log"

    def append(self, result: Result) -> None:
        """Append a result; it is on disk when this returns."""
        line = json.dumps(to_json(result), ensure_ascii=False)
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def results(self) -> dict[str, Result]:
        """Return all results by key, the last of each.

        Raises:
          BenchError: a line is not one that `append` wrote.
        """
        found: dict[str, Result] = {}
        lines = self.lines.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                result = from_json(Result, json.loads(line))
            except (TypeError, ValueError) as error:
                raise BenchError(
                    "`bench`: the file of earlier results is damaged.",
                    where=f"{self.lines}:{number}",
                    numbers=str(error),
                    fix="start over with --fresh, or remove that line.",
                ) from None
            found[result.key] = result
        return found

    def finished(self, versions: Mapping[str, str]) -> dict[str, Result]:
        """Return results that need no repetition: of these versions, and final."""
        return {
            key: result
            for key, result in self.results().items()
            if result.status in FINAL and dict(result.versions) == dict(versions)
        }


def _drop_half_line(path: Path) -> None:
    """Truncate a partial last line after a crash; create a missing file."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def write_json(path: Path, values: Any) -> None:
    """Write records and containers of them to a JSON file, atomically."""
    text = json.dumps(to_json(values), indent=1, ensure_ascii=False)
    write_file("`bench`", path, text + "\n")


def read_results(file: str, what: str) -> tuple[Result, ...]:
    """Return the results that `bench` wrote.

    Args:
      file: SUITE.json of an earlier run.
      what: the command that reads them, for errors.

    Raises:
      BenchError: the file contains no results.
    """
    values = read_json(Path(file))
    try:
        if values is None:
            raise ValueError("it is not there, or no JSON")
        return from_json(tuple[Result, ...], values["results"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"{what}: the file holds no results of a benchmark that compiles.",
            where=file,
            numbers=str(error),
            fix="python -m rhino_jax bench full, then give rhino_bench/full.json.",
        ) from None


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_plans(folder: Path, versions: Mapping[str, str]) -> dict[str, CellOutcome]:
    """Return the outcomes of planning a row, by method, as the process that plans
    wrote them; empty if they are of other versions."""
    listed = read_json(folder / PLANS)
    if listed is None or listed["versions"] != dict(versions):
        return {}
    return from_json(dict[str, CellOutcome], listed["methods"])


def add_plan(
    folder: Path,
    versions: Mapping[str, str],
    method: str,
    outcome: CellOutcome,
    plan: PlanData | None,
) -> None:
    """Save a method's plan, if any, and its outcome, next to those of the same
    versions."""
    if plan is not None:
        save_plan(plan, plan_file(folder, method))
    outcomes = read_plans(folder, versions) | {method: outcome}
    write_json(folder / PLANS, {"versions": versions, "methods": outcomes})


def plan_file(folder: Path, method: str) -> Path:
    """Return the file of a method's plan, in the folder of the row's plans."""
    return folder / f"{file_name(method)}.json"


def in_order(found: Mapping[str, Result], keys: Iterable[str]) -> tuple[Result, ...]:
    """Return the available results of these cells, in the order of the keys."""
    return tuple(found[key] for key in keys if key in found)

"""Suites, and the format of `configs/bench/*.toml`.

    kind = "compile"          # or "clock": run on emulated CPU devices, and time steps;
                              # or "device": run on the devices that are here;
                              # or "plan": plan only, and time it; "pipelines": plan
                              # stages; "scale": plan with nothing specified, and time
                              # every pass; "stages": run them, simulated and measured;
                              # or "calls": call a step once, under jit and auto_shard;
                              # or "layouts": predict steps that others measured
    timeout_s = 900           # limit of making a plan, and of compiling each plan
    methods = ["dp", "fsdp@matmul", "fast", "best"]     # default of rows without

    [[rows]]
    model = "gpt-1.3b"                        # of configs/models, bench/unseen, …
    overrides = {num_layers = 4, batch = 64}  # optional: keys of the model's file
    regime = "plenty"                         # or "little": batch per device
    target = "v5e:4x4"                        # or a list: a row for each
    mesh = {data = 4, model = 4}              # optional: rhino chooses
    memory_share = 0.5                        # optional: budget is half of the peak of
                                              # the plan by "best" in all of the memory
    memory = "6GiB"                           # optional: budget per device
    microbatches = 8                          # of stages; default: rhino chooses
    published_s = [2.3, 0.67]                 # of "layouts": seconds of each method's
                                              # step, as others measured it
    stages = 4                                # of "pipelines"; default: rhino chooses
    per_microbatch = ["batch_norm"]           # of "pipelines": as `rhino.plan` takes it
    published = 0.2                           # of "pipelines": the last method's step
                                              # over the first's, as others measured it
    alpa = {stages = [4, 4], microbatches = 8}    # of method "alpa": see `solution`
    methods = ["fsdp", "best"]                # optional

Methods: see `rhino_jax.bench.methods`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from rhino_jax.bench import holdout, newcomers
from rhino_jax.bench.checks import (
    ROW,
    BenchError,
    PlanOutline,
    built,
    checked,
    entries_of,
    parse_solution,
)
from rhino_jax.bench.methods import ALPA, ShardingMethod, parse_method
from rhino_jax.errors import RhinoError, nearest
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.hardware.files import configs_dir, load_target
from rhino_jax.models import registry
from rhino_jax.models.workload import Workload
from rhino_jax.utils.checked_table import CheckedTable, is_number


KINDS = (
    *("compile", "clock", "device", "plan", "pipelines", "scale", "stages", "calls"),
    "layouts",
)
REGIMES = ("plenty", "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One workload on one target; its methods are compared with each other.

    Attributes:
      model: as in `rhino_jax.models.registry.names`.
      overrides: (key, value) of the model's config that this row replaces.
      regime: "plenty" or "little" batch per device.
      target: hardware with its topology, as "v5e:4x4".
      mesh: (name, size) of every mesh axis, major first; empty: rhino chooses.
      methods: methods to compare.
      memory_share: memory budget of plans, as a share of the best plan's peak; None:
        the target's memory.
      memory_room: memory budget of plans, as a share of the distance from the lowest
        possible peak (0) to the best plan's peak (1); None: the target's memory.
      memory: memory budget of plans, as "6GiB"; empty: the target's memory.
      microbatches: number of micro-batches of stages, or of layouts; 0 in suites
        without, and if rhino chooses.
      stages: number of stages to plan; 0 likewise.
      per_microbatch: ops whose statistics may be those of a micro-batch.
      published: the step of the last method over that of the first, as others measured
        it; 0: unknown.
      published_s: the step of each method in seconds, as others measured it.
      alpa: outline that the method of that name plans; None without it.
    """

    model: str
    overrides: tuple[tuple[str, Any], ...] = ()
    regime: str
    target: str
    mesh: tuple[tuple[str, int], ...] = ()
    methods: tuple[ShardingMethod, ...]
    memory_share: float | None = None
    memory_room: float | None = None
    memory: str = ""
    microbatches: int = 0
    stages: int = 0
    per_microbatch: tuple[str, ...] = ()
    published: float = 0.0
    published_s: tuple[float, ...] = ()
    alpa: PlanOutline | None = None

    @property
    def title(self) -> str:
        """The workload with its batch, target and mesh."""
        mesh = format_mesh(self.mesh) if self.mesh else "mesh left to rhino"
        return f"{self.workload} ({self.regime}), {self.target}, {mesh}"

    def make(self) -> Workload:
        """Return the model, with the row's overrides."""
        return model_of(self.model, **dict(self.overrides))

    @property
    def num_devices(self) -> int:
        """Number of devices of the target."""
        count = load_target(self.target).num_devices
        assert count is not None, "suites name whole topologies"
        return count

    @property
    def workload(self) -> str:
        """The model with overrides and memory, as `gpt-7b num_layers=4`."""
        words = [self.model]
        for k, v in self.overrides:
            words.append(f"{k}={str(v).lower() if isinstance(v, bool) else v}")
        if self.memory_share is not None:
            words.append(f"memory={self.memory_share:.0%}")
        if self.memory_room is not None:
            words.append(f"room={self.memory_room:.0%}")
        others = (
            ("memory", self.memory),
            ("stages", self.stages),
            ("m", self.microbatches),
        )
        words += [f"{name}={value}" for name, value in others if value]
        return " ".join(words)

    def to_table(self) -> dict[str, Any]:
        """Return the row as a suite writes it."""
        return entries_of(
            self,
            overrides=dict(self.overrides),
            mesh=dict(self.mesh),
            methods=[m.name for m in self.methods],
            alpa=self.alpa and self.alpa.to_table(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A named list of rows.

    Attributes:
      name: the file's stem.
      kind: one of `KINDS`.
      timeout_s: time limit of making a plan, and of compiling one, in seconds; a
        refined cell has this limit for each candidate.
      rows: in the order of the file.
    """

    name: str
    kind: str
    timeout_s: float
    rows: tuple[BenchRow, ...]


_MODELS = {**holdout.MODELS, **newcomers.MODELS}
"""Name → function that makes the workload, of models outside the zoo."""


def model_names() -> tuple[str, ...]:
    """Return the models that rows may name: the zoo's and this package's."""
    return (*registry.names(), *sorted(_MODELS))


def model_of(name: str, **overrides: Any) -> Workload:
    """Return a model by name, with a row's overrides.

    Raises:
      ModelConfigError: a value is invalid.
    """
    if name in _MODELS:
        return built(_MODELS[name], name, overrides)
    return registry.get(name, **overrides)


def suites_dir() -> Path:
    """Return the folder of the suites."""
    return configs_dir() / "bench"


def suite_names() -> tuple[str, ...]:
    """Return the names of all suites, sorted."""
    return tuple(sorted(path.stem for path in suites_dir().glob("*.toml")))


def load_suite(name: str) -> Suite:
    """Return a suite by name, or from a file.

    Args:
      name: one of `suite_names()`, or the path of a TOML file.

    Raises:
      BenchError: there is no such suite, or the file is malformed; the message names
        the key.
    """
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        known = suite_names()
        if name not in known:
            raise BenchError(
                f"`bench {name}`: no suite has that name.{nearest(name, known)}",
                where=str(suites_dir()),
                numbers=f"known: {', '.join(known)}",
                fix="use one of these, or give the path of a TOML file.",
            )
        path = suites_dir() / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BenchError(
            "the suite cannot be read.",
            where=str(path),
            numbers=str(error),
            fix="give the path of a TOML file, or correct its syntax there.",
        ) from None
    return parse_suite(table, name=path.stem, file=str(path))


def parse_suite(table: Mapping[str, Any], *, name: str, file: str) -> Suite:
    """Return a checked suite from plain values.

    Args:
      table: the file's content.
      name: name of the suite.
      file: source of the table, for errors.

    Raises:
      BenchError: a key is unknown, missing, or has an invalid value.
    """
    at = CheckedTable(table, "the suite", file, BenchError)
    at.refuse_unknown(("kind", "timeout_s", "methods", "rows"))
    kind = table.get("kind", "compile")
    at.check(kind in KINDS, "kind", kind, " or ".join(map(repr, KINDS)))
    timeout_s = table.get("timeout_s", 900)
    is_positive = is_number(timeout_s) and timeout_s > 0
    at.check(is_positive, "timeout_s", timeout_s, "a number of seconds > 0")
    rows = table.get("rows", MISSING)
    is_list = isinstance(rows, list) and all(isinstance(r, dict) for r in rows)
    at.check(is_list and bool(rows), "rows", rows, "one or more tables [[rows]]")
    methods = table.get("methods")
    parsed = tuple(
        _parse_row(
            CheckedTable(row, f"row {i} of the suite", file, BenchError), methods
        )
        for i, row in enumerate(_each_target(rows), start=1)
    )
    keys = [json.dumps([row.workload, row.target, row.mesh]) for row in parsed]
    for i, (row, key) in enumerate(zip(parsed, keys, strict=True), start=1):
        first = keys.index(key) + 1
        if first < i:
            raise BenchError(
                f"rows {first} and {i} of the suite are the same.",
                where=file,
                numbers=f"{row.workload} on {row.target}",
                fix="remove one; its methods can be added to the other.",
            )
    return Suite(name=name, kind=kind, timeout_s=float(timeout_s), rows=parsed)


def _each_target(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield a row for every target of a list of them."""
    for row in rows:
        target = row.get("target")
        if isinstance(target, list):
            yield from ({**row, "target": one} for one in target)
        else:
            yield row


def _parse_row(at: CheckedTable, default: Any) -> BenchRow:
    row = at.entries
    at.refuse_unknown(f.name for f in fields(BenchRow))
    model, regime, target = (
        row.get(key, MISSING) for key in ("model", "regime", "target")
    )
    at.check(model in model_names(), "model", model, "a model", model_names())
    at.check(regime in REGIMES, "regime", regime, " or ".join(map(repr, REGIMES)))
    given = checked(at, ROW)
    is_one = "memory_share" not in row or "memory_room" not in row
    said = row.get("memory_room")
    at.check(is_one, "memory_room", said, "left out beside `memory_share`")
    methods = row.get("methods", default)
    is_list = isinstance(methods, list) and bool(methods)
    at.check(is_list, "methods", methods, "a list of methods, here or for all rows")
    try:
        num_devices = load_target(target).num_devices
        parsed = tuple(dict.fromkeys(parse_method(m) for m in methods))
        model_of(model, **row.get("overrides", {}))
    except RhinoError as error:
        raise BenchError(
            f"{at.what} is malformed: {error.what}",
            where="; ".join(filter(None, (at.file, error.where))),
            numbers=error.numbers,
            fix=error.fix,
        ) from None
    expected = "a target with its topology, as 'v5e:4x4'"
    at.check(num_devices is not None, "target", target, expected)
    assert num_devices is not None
    mesh = row.get("mesh")
    is_whole = not mesh or math.prod(mesh.values()) == num_devices
    at.check(
        is_whole, "mesh", mesh, f"axes of {num_devices} devices together, as {target}"
    )
    alpa = parse_solution(row.get("alpa"), num_devices, at)
    if alpa is None and any(m.plan == ALPA for m in parsed):
        at.check(False, "alpa", None, 'a table, as the row has the method "alpa"')
    return BenchRow(**given | {"methods": parsed, "alpa": alpa})

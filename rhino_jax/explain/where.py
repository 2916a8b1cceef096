"""The stage of a value: why it is there, and which layouts the adjacent stages use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.explain.place import PlacedValues, nodes_of
from rhino_jax.ir.op import Source
from rhino_jax.ir.places import at_place, path_glob
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.passes.staged.step import TaskKind, TaskSend, ValueKey, ValueKind
from rhino_jax.planner.staging.fitted import SolvedStages
from rhino_jax.units import format_bytes, format_seconds


MAX_LINES = 3
"""Maximum number of readers or names in a sentence; the rest are counted."""


@dataclass(frozen=True, eq=False)
class Where:
    """A place on a stage.

    Attributes:
      solved: the plan.
      pins: pinned stages: key → stage.
      stage: the stage.
      place: the values on it.
    """

    solved: SolvedStages
    pins: Mapping[str, int]
    stage: int
    place: PlacedValues

    def sentences(self, *, is_first: bool) -> list[str]:
        """Return sentences on why the place is on this stage.

        With `is_first`, they end with the balance of all stages.
        """
        together = [self._balance()] if is_first else []
        return [*self._here(), *self._cut(), *together]

    def hands(self) -> list[str]:
        """Return sentences on pins, and on stages that send or receive the place."""
        return [*self._pinned(), *self._handed(), *self._beside()]

    @cached_property
    def _arguments(self) -> list[ValueKey]:
        arguments = self.solved.groups[self.stage].of.arguments
        return [arguments[i] for i in self.place.inputs]

    @cached_property
    def _readers(self) -> dict[str, Source]:
        """Return source line → source of the forward ops that read the place."""
        group = self.solved.groups[self.stage]
        program, model = group.of.program, group.found.best.model
        ahead = {
            o
            for task, op in zip(group.of.tasks, program.body.ops, strict=True)
            if task.kind is TaskKind.FORWARD
            for o in _inside(program, op)
        }
        nodes, found = model.graph.nodes, dict[str, Source]()
        around = nodes_of(model, self.place)
        while around:
            ends = [e.target for n in around for e in model.graph.outgoing[n]]
            for op in (nodes[n].op for n in ends):
                if op is not None and op.id in ahead:
                    found.setdefault(_line(op.source), op.source)
            # Several ops may read one COPY node.
            around = [n for n in ends if nodes[n].kind is NodeKind.COPY]
        found.pop("", None)
        return found

    def _here(self) -> Iterator[str]:
        name, stage = self.place.name, self.stage
        stages = f"stage {stage} of {len(self.solved.groups)}"
        ends = [self.solved.of_step.inputs[k.number] for k in self._arguments
                if k.kind is ValueKind.INPUT]  # fmt: skip
        parts = {e.part for e in ends if e.part is not None}
        lines = _listed(list(self._readers))
        pins = [k for k in self.pins if self.pins[k] == stage and self._is_meant(k)]
        if parts:
            part = next(e for e in ends if e.part is not None)
            sizes = self.solved.of_step.sizes[part.whole]
            ranges = list(accumulate(sizes, initial=0))
            first, last = ranges[min(parts)], ranges[max(parts) + 1] - 1
            layers = f"layers {first} to {last}" if last > first else f"layer {first}"
            start = stage - min(parts)
            each = f"each of stages {start} to {start + len(sizes) - 1}"
            if len(sizes) == len(self.solved.groups):
                each = "every stage"
            yield (
                f"{name} is on {stages}: layers run in one loop, so {each} has its part"
                f" of the stack, this one {layers} of {ranges[-1]}."
            )
        elif pins:
            yield f"{name} is on {stages}, pinned there: {_listed(pins)}."
        elif lines:
            yield f"{name} is on {stages}, where {lines} reads it."
        else:
            yield f"{name} is on {stages}."
        homes = {self.solved.step.home[k.number] for k in self._arguments
                 if k.kind is ValueKind.INPUT} - {stage}  # fmt: skip
        copies = sorted(
            {
                g
                for i, g in self.solved.step.copies
                if ValueKey(ValueKind.INPUT, i) in self._arguments and g != stage
            }
        )
        if homes and not parts:
            home = _listed([str(h) for h in sorted(homes)])
            yield f"it is stored on stage {home}; this is a copy of what is read here."
        elif copies:
            others = _listed(list(map(str, copies)))
            yield f"it is stored here, and read on stage {others}, too."

    def _is_meant(self, key: str) -> bool:
        """Whether a stage pin's key names the place or an op that reads it."""
        glob = path_glob(key)
        inputs = self.solved.groups[self.stage].of.program.inputs
        paths = [inputs[i].path for i in self.place.inputs]
        sources = self._readers.values()
        return any(map(glob.match, paths)) or any(map(at_place(key), sources))

    def _cut(self) -> Iterator[str]:
        """Return sentences on activations sent across this stage's cuts."""
        for send in self._largest():
            line = self._made_at(send)
            made = f" made at {line}" if line else ""
            yield (
                f"the stages divide where stage {send.source} sends stage {send.target}"
                f" the {self._what(send.key)}{made}, of every micro-batch."
            )

    def _largest(self) -> Iterator[TaskSend]:
        """Yield the largest activation received, then the largest sent."""
        sends = [s for s in self.solved.step.sends if s.kind is TaskKind.FORWARD
                 and s.key.kind is ValueKind.INSIDE]  # fmt: skip
        for mine in (
            [s for s in sends if s.target == self.stage],
            [s for s in sends if s.source == self.stage],
        ):
            if mine:
                yield max(mine, key=lambda s: int(self.solved.step.types[s.key].size))

    def _what(self, key: ValueKey) -> str:
        aval = self.solved.step.types[key]
        return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"

    def _made_at(self, send: TaskSend) -> str:
        """Return the source line that produces a sent value; empty if unknown."""
        of = self.solved.groups[send.source].of
        for task, op in zip(of.tasks, of.program.body.ops, strict=True):
            call = of.program.ops[op].call
            if send.key in task.makes and call is not None:
                value = call.regions[0].outputs[task.makes.index(send.key)]
                makers = {v: o for o in of.program.ops for v in o.results}
                maker = makers.get(value)
                return _line(maker.source) if maker is not None else ""
        return ""

    def _balance(self) -> str:
        """Return the sentence on seconds and peak memory of all stages."""
        took = [
            f"{format_seconds(g.found.step_s)} of stage {i}"
            for i, g in enumerate(self.solved.groups)
        ]
        held = [format_bytes(n) for n in self.solved.laid().peaks]
        pinned = " with these pins" if self.pins else ""
        return (
            f"a step takes {_listed(took)}, which hold {_listed(held)} a device: of all"
            f" cuts{pinned} this one was estimated to be the fastest."
        )

    def _pinned(self) -> Iterator[str]:
        request, of_step = self.solved.request, self.solved.of_step
        wholes = {of_step.inputs[k.number].whole for k in self._arguments
                  if k.kind is ValueKind.INPUT}  # fmt: skip
        if wholes & request.pins.keys():
            yield f"pinned: {self.place.key}; the other layouts are without that pin."

    def _handed(self) -> Iterator[str]:
        """Return sentences on transfers of the place itself between stages."""
        of = self.solved.groups[self.stage].of
        results = [of.results[i] for i in self.place.outputs]
        ends = dict(zip(of.results, (e.value for e in of.program.outputs), strict=True))
        results += [k for k, v in ends.items() if v in self.place.values]
        for send in self.solved.step.sends:
            spec = self._spec(send.target, send.key)
            if send.target == self.stage and send.key in self._arguments:
                yield f"stage {send.source} hands it over as {spec}."
            elif send.source == self.stage and send.key in results:
                yield f"stage {send.target} gets it as {spec}."

    def _beside(self) -> Iterator[str]:
        """Return sentences on the layouts of other values at the stage's boundaries."""
        for send in self._largest():
            if send.key in self._arguments:
                continue
            what, spec = self._what(send.key), self._spec(send.target, send.key)
            if send.target == self.stage:
                yield f"stage {send.source} hands {what} over to this one as {spec}."
            else:
                yield f"stage {send.target} gets {what} of this one as {spec}."

    def _spec(self, stage: int, key: ValueKey) -> str:
        group = self.solved.groups[stage]
        names = group.found.best.model.mesh.names
        spec: Spec = group.specs[key]
        return format_spec(spec, names)


def _inside(program: Program, op: int) -> Iterator[int]:
    """Yield an op and all ops of its regions."""
    yield op
    call = program.ops[op].call
    for region in () if call is None else call.regions:
        for inner in region.ops:
            yield from _inside(program, inner)


def _line(source: Source) -> str:
    return str(source).partition(" (")[0].strip("?")


def _listed(names: list[str]) -> str:
    """Join names as "a, b and c", with those above `MAX_LINES` counted."""
    rest = len(names) - MAX_LINES
    if rest > 0:
        names = [*names[:MAX_LINES], f"{rest} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)

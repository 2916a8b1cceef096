"""Divide the compute of a compiled program among the ops that were planned.

The compiler names source line and primitive of every instruction, also within fusions.
An instruction's seconds are divided among the ops that it, or its fusion, computes: in
proportion to their planned seconds, of which an op with several instructions has an
equal part in each run. Instructions that name no op with a planned cost are divided
among those of their line. What remains (copies without a name) belongs to no op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rhino_jax.cost.corrections import OpKey, op_key
from rhino_jax.frontend.registry import traits_of
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Source
from rhino_jax.ir.traits import OpKind
from rhino_jax.plan.plan import PlanData
from rhino_jax.verify.hlo.module import Instruction, Module
from rhino_jax.verify.hlo.reading import module_of, work_s
from rhino_jax.verify.hlo.records import Compilation
from rhino_jax.verify.hlo.work import WorkReader


_NO_OP = frozenset(
    "parameter constant bitcast tuple get-tuple-element broadcast iota".split()
)
_PRODUCTS = ("dot", "convolution")


def compiled_times(
    compilation: Compilation,
    plan: PlanData,
    target: Target,
    planned_s: Mapping[OpKey, float],
) -> tuple[dict[OpKey, float], float]:
    """Return the compiled seconds of ops per step, and of instructions of no op.

    Args:
      compilation: the compiled program, which fits.
      plan: its plan; gives the trips of loops.
      target: the hardware whose rates turn work into seconds.
      planned_s: key of ops → their planned seconds of compute per step.
    """
    module = module_of(compilation, plan.while_loops)
    return _Division.of(module, target, planned_s).divided()


@dataclass(frozen=True, slots=True)
class _Division:
    """The instructions of a program and the ops that each computes.

    Attributes:
      planned_s: see `compiled_times`.
      items: (seconds, keys of ops, source line) of every instruction that takes time.
      runs: key of ops → runs of instructions that compute them.
      on_line: source line → keys of ops with a planned cost.
    """

    planned_s: Mapping[OpKey, float]
    items: list[tuple[float, int, tuple[OpKey, ...], str]] = field(default_factory=list)
    runs: Counter[OpKey] = field(default_factory=Counter)

    @classmethod
    def of(
        cls, module: Module, target: Target, planned_s: Mapping[OpKey, float]
    ) -> _Division:
        found = cls(planned_s)
        by_name = {i.name: i for c in module.computations.values() for i in c}
        for work in WorkReader(module, lambda w: work_s(target, w)).program().items:
            seconds = work.count * work_s(target, work)
            instruction = by_name[work.name]
            inner = [*_within(module, instruction)]
            keys = {_key(i) for i in inner if _computes(i, inner)}
            known = tuple(k for k in keys if planned_s.get(k))
            found.items.append((seconds, work.count, known, work.source))
            found.runs.update(dict.fromkeys(known, work.count))
        return found

    def divided(self) -> tuple[dict[OpKey, float], float]:
        on_line: dict[str, list[OpKey]] = {}
        for key, seconds in self.planned_s.items():
            if seconds and key[0]:
                on_line.setdefault(key[0], []).append(key)
        taken: dict[OpKey, float] = defaultdict(float)
        rest_s = 0.0
        for seconds, count, keys, line in self.items:
            if keys:
                shares = {k: self.planned_s[k] * count / self.runs[k] for k in keys}
            else:
                shares = {k: self.planned_s[k] for k in on_line.get(line, ())}
            whole_s = sum(shares.values())
            for key, share in shares.items():
                taken[key] += seconds * share / whole_s
            rest_s += 0.0 if shares else seconds
        return dict(taken), rest_s


def _within(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, or those of its fusion, that compute something."""
    called = module.computations.get(instruction.called)
    if instruction.opcode.startswith("fusion") and called is not None:
        for inner in called:
            yield from _within(module, inner)
    elif instruction.opcode not in _NO_OP:
        yield instruction


def _computes(instruction: Instruction, fusion: list[Instruction]) -> bool:
    """Whether an instruction is what its name says: copies and casts of a product's
    operands have the product's name, in fusions of other ops too."""
    primitive = instruction.op_name.rpartition("/")[2]
    is_named = traits_of(primitive).kind in (OpKind.CONTRACTION, OpKind.CONVOLUTION)
    return len(fusion) == 1 or not is_named or instruction.opcode in _PRODUCTS


def _key(instruction: Instruction) -> OpKey:
    stack, _, primitive = instruction.op_name.rpartition("/")
    source = Source(file="-", name_stack=stack)
    _, direction, _ = op_key(source, primitive)
    return instruction.source, direction, primitive

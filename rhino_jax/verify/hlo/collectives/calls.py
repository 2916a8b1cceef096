"""Which computations an instruction runs, and which of them move data."""

from __future__ import annotations

from dataclasses import dataclass, field

from rhino_jax.verify.hlo.collectives.payload import collective_kind
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, called_names


@dataclass(frozen=True, slots=True)
class Calls:
    """The call graph of a module, cut down to what moves data.

    Attributes:
      module: the program.
      memo: computation → whether it, or what it calls, moves data.
    """

    module: Module
    memo: dict[str, bool] = field(default_factory=dict)

    def moving(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that an instruction runs and that move data.

        What an asynchronous operation runs, it runs where it starts.
        """
        if instruction.opcode.endswith(("-done", "-update")):
            return ()
        return tuple(
            self.module.computations[name]
            for name in called_names(instruction)
            if self._is_moving(name)
        )

    def _is_moving(self, name: str) -> bool:
        if name not in self.module.computations:
            return False
        if name not in self.memo:
            self.memo[name] = any(
                collective_kind(instruction)
                or any(self._is_moving(x) for x in called_names(instruction))
                for instruction in self.module.computations[name]
            )
        return self.memo[name]

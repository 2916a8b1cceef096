"""The call graph of a module, restricted to computations with collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from rhino_jax.verify.hlo.collectives.payload import collective_kind
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, called_names


@dataclass(frozen=True, slots=True)
class Calls:
    """The call graph of a module, restricted to computations with collectives.

    Attributes:
      module: the program.
      memo: cache: computation → whether it, or a callee, has a collective.
    """

    module: Module
    memo: dict[str, bool] = field(default_factory=dict)

    def moving(self, instruction: Instruction) -> tuple[Computation, ...]:
        """Return the computations with collectives that an instruction calls.

        The computation of an asynchronous operation counts where it starts.
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

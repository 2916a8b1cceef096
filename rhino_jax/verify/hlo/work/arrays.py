"""Parse array types as HLO writes them: element type and dims."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rhino_jax.verify.hlo.module import type_bytes


@dataclass(frozen=True, slots=True)
class HloArray:
    """One array of a type.

    Attributes:
      element: element type, as `bf16`.
      dims: dim sizes, major first.
    """

    element: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return type_bytes(f"{self.element}[{','.join(map(str, self.dims))}]")


_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")


def arrays_of(text: str) -> tuple[HloArray, ...]:
    """Return the arrays of a type: one, or those of a tuple in order.

    Args:
      text: a type, as `f32[8,128]{1,0}` or `(f32[8], s32[])`.
    """
    return tuple(
        HloArray(name, tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip()))
        for name, dims in _ARRAY.findall(text)
    )


_NAMES = {
    "pred": "bool", "f64": "float64", "f32": "float32", "f16": "float16",
    "bf16": "bfloat16", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def dtype_name(element: str) -> str:
    """Return JAX's name of an element type: `float8_e4m3fn` for `f8e4m3fn`."""
    if element in _NAMES:
        return _NAMES[element]
    family, rest = element[0], element[1:]
    if family == "f":
        return f"float{rest[0]}_{rest[1:]}"
    return {"s": "int", "u": "uint"}.get(family, element) + rest

"""Value, Op and Region: what a program is made of.

The IR knows neither JAX nor hardware, and its factors are not tied to meshes.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from dataclasses import dataclass, field

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.traits import Traits


ITEM_BYTES = {
    "bool": 1, "int4": 1, "uint4": 1, "int8": 1, "uint8": 1, "int16": 2,
    "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16, "float0": 0,
}  # fmt: skip


USERS_CONSTRAINT = "sharding_constraint"
"""The op that `jax.lax.with_sharding_constraint` makes in a user's program."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element; PRNG keys (`key<fry>`) hold two 32-bit words."""
    if dtype.startswith("key<"):
        return 16 if "rbg" in dtype else 8
    if dtype.startswith("float8"):
        return 1
    return ITEM_BYTES.get(dtype, 4)


@dataclass(frozen=True, slots=True)
class Value:
    """An array.

    Attributes:
      id: position in `Program.values`.
      shape: global shape.
      dtype: name of the element type, as NumPy and JAX print it.
      is_literal: a constant written in the program text; never planned.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    is_literal: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return _array_bytes(self.shape, self.dtype)


@functools.lru_cache(maxsize=1 << 12)
def _array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * item_bytes(dtype)


RECOMPUTED = "rematted_computation"
"""In the name stack of what `jax.checkpoint` computes again. Source: jax 0.10 and 0.9,
`jax/_src/ad_checkpoint.py`."""

_TRANSFORM = re.compile(r"\w+\(")
"""As in `transpose(jvp(encoder/attn))`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's code a thing comes from."""

    file: str = ""
    line: int = 0
    function: str = ""
    name_stack: str = ""

    def __str__(self) -> str:
        if not self.file:
            return self.name_stack or "?"
        name = self.file.rsplit("/", 1)[-1]
        return f"{name}:{self.line} ({self.function})"

    @property
    def scopes(self) -> str:
        """The user's scopes, as `encoder/layer_0/attn`: the name stack without the
        marks of JAX's transforms."""
        bare = _TRANSFORM.sub("", self.name_stack).replace(")", "")
        return "/".join(part for part in bare.split("/") if part)

    @property
    def is_recomputed(self) -> bool:
        """Whether `jax.checkpoint` computes it again in the backward pass."""
        return RECOMPUTED in self.name_stack

    @property
    def is_backward(self) -> bool:
        """Whether reverse differentiation made this op."""
        return "transpose(" in self.name_stack


class RegionKind(enum.Enum):
    """How an op runs its regions.

    CALL: once, inputs and results pass through (jit, remat, custom derivatives).
    SCAN: `length` times; operands are consts, carries, stacked inputs; results
      are carries, stacked outputs.
    WHILE: regions are (condition, body); operands are the condition's consts,
      the body's consts, carries; results are carries.
    COND: operands are a branch index and inputs of every region; one region runs.
    """

    CALL = "call"
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"


@dataclass(frozen=True, slots=True)
class Region:
    """A sub-program: values that enter, ops in order, values that leave."""

    inputs: tuple[int, ...]
    ops: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegionCall:
    """The regions of an op and how they are run.

    Attributes:
      kind: see `RegionKind`.
      regions: the regions.
      num_consts: SCAN: consts; WHILE: consts of the body.
      num_cond_consts: WHILE: consts of the condition.
      num_carry: carries of a loop.
      trip_count: how often the body runs; for a loop whose bound the program
        does not say, the assumed count (see `is_trip_count_known`).
      is_trip_count_known: whether `trip_count` follows from the program.
      max_trip_count: bound of a WHILE that data may end earlier; None where the
        program has none.
      is_remat: values inside are recomputed and not kept (CALL only).
      is_apart: operands enter through an optimization barrier, so that nothing inside
        merges with its like outside (CALL only).
      is_program: compiled as a program of its own: what enters and what leaves it is
        in memory (CALL only).
    """

    kind: RegionKind
    regions: tuple[Region, ...]
    num_consts: int = 0
    num_cond_consts: int = 0
    num_carry: int = 0
    trip_count: int = 1
    is_trip_count_known: bool = True
    max_trip_count: int | None = None
    is_remat: bool = False
    is_apart: bool = False
    is_program: bool = False


PIN = "rhino_pin"
"""The identity, with which a user holds a layout fixed."""

AxisNames = tuple[str, ...]
NamedMesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """A layout as its user wrote it.

    Attributes:
      layout: of every dim the names of the mesh axes that cut it, major first; None
        where that is left open.
      mesh_axes: (name, size) of the axes of the mesh that it is meant for; None: any.
    """

    layout: tuple[AxisNames | None, ...]
    mesh_axes: NamedMesh | None = None


@dataclass(frozen=True, slots=True)
class ManualCollective:
    """What an op that its user cut by hand sends itself.

    Attributes:
      kind: as "all-reduce".
      axes: names of the mesh axes that it runs over.
      local_bytes: on one device: of the result of an all-gather, of the operands of
        the others.
      runs: how often, in one run of the op.
      source: the user's line.
    """

    kind: str
    axes: AxisNames
    local_bytes: int
    runs: int = 1
    source: Source = field(default_factory=Source, compare=False)


@dataclass(frozen=True, slots=True)
class Manual:
    """An op that runs once on each device, on shards that its user says.

    Attributes:
      operands, results: of every dim of each, the names of the mesh axes that cut it.
      mesh_axes: (name, size) of the mesh that it is written for.
      num_shards: how often it runs.
      collectives: what it sends itself.
      is_all_priced: whether these are all that it sends.
    """

    operands: tuple[tuple[AxisNames, ...], ...]
    results: tuple[tuple[AxisNames, ...], ...]
    mesh_axes: NamedMesh
    num_shards: int
    collectives: tuple[ManualCollective, ...] = ()
    is_all_priced: bool = True


_NO_TRAITS = Traits()


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
      id: position in `Program.ops`.
      name: the primitive's name.
      operands: value ids.
      results: value ids.
      rule: its factors; None for an op with regions. Equal rules of a program are one
        object.
      flops: floating-point operations of the whole op (one run).
      is_fusible: reads and writes through registers when its neighbours do (an
        elementwise op, a broadcast, an iota): its results need not touch memory.
      traits: what it is, whatever its shapes.
      is_known: False where no rule exists and the op is replicated.
      call: regions, if any.
      source: the user's line.
      label: a few words on parameters, for people.
      pin: of an op named `PIN`, the layout that its user holds fixed.
      manual: how its user cut it by hand, if so (`shard_map`).
    """

    id: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    flops: float = 0.0
    is_fusible: bool = False
    traits: Traits = _NO_TRAITS
    is_known: bool = True
    call: RegionCall | None = None
    source: Source = field(default_factory=Source)
    label: str = ""
    pin: Pin | None = None
    manual: Manual | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the program's arguments, or a captured constant.

    Attributes:
      value: value id.
      path: tree path, as `params['w1']` or `opt_state[0].mu['w1']`.
      is_donated: its memory may be reused for results.
      is_const: captured from the function's closure, not an argument.
    """

    value: int
    path: str
    is_donated: bool = False
    is_const: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the program's result.

    Attributes:
      value: value id.
      path: tree path.
      state_of: position in `Program.inputs` of the argument that this result
        replaces in the next call, and whose sharding it must have; or None.
    """

    value: int
    path: str
    state_of: int | None = None

"""Value, Op and Region: the elements of a program.

The IR knows neither JAX nor hardware, and its factors are not tied to meshes.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.traits import Traits


T = TypeVar("T")


USERS_CONSTRAINT = "sharding_constraint"
"""Name of the op of `jax.lax.with_sharding_constraint` in a user's program."""


@functools.cache
def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; types of less than a byte (`int2`,
    `float4_e2m1fn`) take one, PRNG keys two 32-bit words, or four (`rbg`)."""
    if dtype.startswith("key<"):
        return 16 if "rbg" in dtype else 8
    if dtype == "bool":
        return 1
    bits = re.search(r"\d+", dtype)
    return -(-int(bits[0]) // 8) if bits else 4


@dataclass(frozen=True, slots=True)
class Value:
    """An array.

    Attributes:
      id: position in `Program.values`.
      shape: global shape.
      dtype: name of the element type, as NumPy and JAX print it.
      is_literal: whether it is a constant in the program text, which is never planned.
      on_host: whether it is in the memory of the host, not of the devices.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    is_literal: bool = False
    on_host: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return _array_bytes(self.shape, self.dtype)


@functools.lru_cache(maxsize=1 << 12)
def _array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * item_bytes(dtype)


RECOMPUTED = "rematted_computation"
"""Marks, in a name stack, an op that `jax.checkpoint` recomputes. Source: jax 0.10 and
0.9, `jax/_src/ad_checkpoint.py`."""

_TRANSFORM = re.compile(r"\w+\(")
"""Matches the marks of JAX's transforms in a name stack, as in
`transpose(jvp(encoder/attn))`."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place in the user's code that an op comes from."""

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
        """Whether the op is recomputed in the backward pass, by `jax.checkpoint`."""
        return RECOMPUTED in self.name_stack

    @property
    def is_backward(self) -> bool:
        """Whether reverse-mode differentiation created this op."""
        return "transpose(" in self.name_stack


class RegionKind(enum.Enum):
    """The way in which an op runs its regions.

    CALL: once; inputs and results pass through (jit, remat, custom derivatives).
    SCAN: `length` times; operands are consts, carries, stacked inputs; results are
      carries, stacked outputs.
    WHILE: regions are (condition, body); operands are the condition's consts, the
      body's consts, carries; results are carries.
    COND: operands are a branch index and inputs of every region; one region runs.
    """

    CALL = "call"
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"


@dataclass(frozen=True, slots=True)
class Region:
    """A sub-program: input values, ops in order, output values."""

    inputs: tuple[int, ...]
    ops: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegionCall:
    """The regions of an op, and how it runs them.

    Attributes:
      kind: see `RegionKind`.
      regions: the regions.
      num_consts: number of consts of a SCAN, or of the body of a WHILE.
      num_cond_consts: number of consts of the condition of a WHILE.
      num_carry: number of carries of a loop.
      trip_count: how often the body runs; an assumed count where the program does not
        determine it (see `is_trip_count_known`).
      is_trip_count_known: whether `trip_count` follows from the program.
      max_trip_count: upper bound on the trips of a WHILE whose end depends on data;
        None where the program has none.
      is_remat: values inside are recomputed and not saved for the backward pass (CALL
        only).
      is_apart: operands enter through an optimization barrier, so that the compiler
        merges no op inside with an equal one outside, by CSE (CALL only).
      is_program: compiled as a separate program, so that its inputs and outputs are in
        memory (CALL only).
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

    @property
    def first_slice(self) -> int:
        """Position of the first operand that a SCAN slices."""
        return self.num_consts + self.num_carry

    def consts(self, inputs: Sequence[T]) -> Sequence[T]:
        """Return the consts among operands of a SCAN, or inputs of a loop's body."""
        return inputs[: self.num_consts]

    def carries(self, inputs: Sequence[T]) -> Sequence[T]:
        """Return the carries among operands of a SCAN, or inputs of a loop's body."""
        return inputs[self.num_consts : self.first_slice]

    def sliced(self, inputs: Sequence[T]) -> Sequence[T]:
        """Return the operands that a SCAN slices, or the slices among its inputs."""
        return inputs[self.first_slice :]

    def stacked(self, results: Sequence[T]) -> Sequence[T]:
        """Return the results that a SCAN stacks, or what they stack of its outputs."""
        return results[self.num_carry :]


PIN = "rhino_pin"
"""The identity op with which a user fixes a layout."""

AxisNames = tuple[str, ...]
NamedMesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """A layout that the user fixed.

    Attributes:
      layout: [dims], names of the mesh axes that shard each dim, major first; None
        where the pin leaves the dim open.
      mesh_axes: (name, size) of the axes of the mesh that it applies to; None: any
        mesh.
    """

    layout: tuple[AxisNames | None, ...]
    mesh_axes: NamedMesh | None = None


@dataclass(frozen=True, slots=True)
class ManualCollective:
    """A collective inside an op that its user partitioned manually (`shard_map`).

    Attributes:
      kind: name of one of `collectives.KINDS`.
      axes: names of the mesh axes that it runs over.
      local_bytes: bytes on one device: of the result of an all-gather, of the operands
        of all other kinds.
      runs: how often it runs in one run of the op.
      source: the user's line.
    """

    kind: str
    axes: AxisNames
    local_bytes: int
    runs: int = 1
    source: Source = field(default_factory=Source, compare=False)


@dataclass(frozen=True, slots=True)
class Manual:
    """The manual partitioning of an op that runs once on each device, on shards that
    the user specifies (`shard_map`).

    Attributes:
      operands, results: [values][dims], names of the mesh axes that shard each dim.
      mesh_axes: (name, size) of the axes of the mesh that it is written for.
      num_shards: number of devices that run it.
      collectives: the collectives inside it.
      is_all_priced: whether `collectives` lists all that it sends.
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
      operands: ids of the values that it reads.
      results: ids of the values that it computes.
      rule: its factors; None for an op with regions. Equal rules in a program are one
        shared object.
      flops: floating-point operations of the whole op (one run).
      is_fusible: reads and writes through registers when its neighbours do (an
        elementwise op, a broadcast, an iota): its results need not touch memory.
      traits: its properties that do not depend on shapes.
      is_known: whether a rule exists; an op without one is replicated.
      call: its regions; None where it has none.
      source: the user's line.
      label: a short description of its parameters, for printing.
      pin: for an op named `PIN`, the layout that its user fixed; None for all others.
      manual: its manual partitioning (`shard_map`); None where it has none.
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
      is_donated: whether its memory may be reused for results.
      is_const: whether it is captured from the function's closure, not an argument.
    """

    value: int
    path: str
    is_donated: bool = False
    is_const: bool = False

    @property
    def argument(self) -> str:
        """Name of the argument that it belongs to, as `params`."""
        return self.path.partition("[")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the program's result.

    Attributes:
      value: value id.
      path: tree path.
      state_of: position in `Program.inputs` of the argument that this result replaces
        in the next call, and whose sharding it must have; None where it replaces none.
    """

    value: int
    path: str
    state_of: int | None = None

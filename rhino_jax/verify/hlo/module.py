"""Parse HLO text into computations and instructions with the user's source lines.

Reads what `compiled.as_text()` prints for CPU, TPU and GPU, and no more of it than
verification needs: names, opcodes, types, operands and the text of attributes.

An instruction names the user's file and line itself (`source_file`, `source_line`), or,
in newer texts, a stack frame in the tables at the head of the module.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhino_jax.frontend.provenance import cell_of, is_library_file


_RUNTIME = str(Path(__file__).parents[2] / "runtime")

_FILE = re.compile(r'source_file="((?:\\.|[^"\\])*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")


def source_of(metadata: str, frames: Mapping[int, str]) -> str:
    """Return the user's source line in an instruction's metadata, or empty."""
    frame = _FRAME.search(metadata)
    if frame is not None and int(frame.group(1)) in frames:
        return frames[int(frame.group(1))]
    file, line = _FILE.search(metadata), _LINE.search(metadata)
    if file is None:
        return ""
    return _short(file.group(1)) + (f":{line.group(1)}" if line else "")


_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


def parse_frames(lines: Sequence[str]) -> dict[int, str]:
    """Parse the stack frame tables at the head of a module into `file.py:12 (f)`."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None:
            row = _TABLE_ROW.match(line)
            if row is not None:
                current[int(row.group(1))] = row.group(2)
            elif line.startswith(("ENTRY", "%")):
                break
    places = {
        number: _place(row, tables)
        for number, row in tables.get("FileLocations", {}).items()
    }
    frames = {
        number: (places.get(_field(row, "file_location_id")), row)
        for number, row in tables.get("StackFrames", {}).items()
    }
    return {number: _users_line(number, frames) for number in frames}


def _users_line(
    number: int, frames: Mapping[int, tuple[tuple[str, str] | None, str]]
) -> str:
    """Return the source line of the innermost frame outside libraries such as optax.

    Where all frames are in libraries, it is the line of the frame itself. Empty for
    what applies a plan to an argument: the line around that is where the program is
    lowered, not a line of the program.
    """
    at = number
    while at in frames:
        place, row = frames[at]
        if place is not None and place[0].startswith(_RUNTIME):
            return ""
        if place is not None and not is_library_file(place[0]):
            return place[1]
        # One more than the parent's number: 1 stands for none.
        at = _field(row, "parent_frame_id") - 1
    own, _ = frames[number]
    return "" if own is None else own[1]


def _place(row: str, tables: Mapping[str, Mapping[int, str]]) -> tuple[str, str]:
    """Return the file of a location, and its line as `file.py:12 (f)`."""
    file = tables.get("FileNames", {}).get(_field(row, "file_name_id"), "")
    name = tables.get("FunctionNames", {}).get(_field(row, "function_name_id"), "")
    file, name = file.strip('"'), name.strip('"').rsplit("<locals>.", 1)[-1]
    return file, f"{_short(file)}:{_field(row, 'line')} ({name})"


def _short(file: str) -> str:
    return cell_of(file).rsplit("/", 1)[-1]


def _field(row: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", row)
    return int(found.group(1)) if found else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without `%`.
      opcode: HLO opcode, as `all-reduce-start`.
      type: type of the result, with layouts.
      operands: names of the operands; for a constant or parameter, its text.
      attributes: text after the operands, without metadata.
      op_name: JAX's name of the operation, as `jit(f)/while/body/dot_general`.
      source: the user's source line, as `train.py:41 (loss)`.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    op_name: str = ""
    source: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the result on one device; the sum over all elements of a tuple."""
        return type_bytes(self.type)

    def attribute(self, name: str) -> str:
        """Return the text of a simple attribute (a name or number), or empty."""
        return self.find(rf"\b{name}=%?([\w.\-]+)")

    def find(self, pattern: str | re.Pattern[str]) -> str:
        """Return what the group of a pattern matches in the attributes, or empty."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> str:
        """Name of the computation that a fusion, a call or an async start runs."""
        return self.attribute("calls") or self.attribute("to_apply")


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation of the module.

    Attributes:
      name: without `%`.
      instructions: by name, in the printed (for scheduled modules: run) order.
      root: name of the instruction that is the result.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def origin(self, name: str, through: Collection[str]) -> Instruction:
        """Return the instruction that defines a value, looking through some opcodes."""
        instruction = self.instructions[name]
        while instruction.opcode in through:
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def users(self) -> dict[str, list[Instruction]]:
        """Return the users of each instruction's result, in printed order."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                if name in users:
                    users[name].append(instruction)
        return users


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: name of the entry computation.
      num_partitions: number of devices that the program runs on.
      loops: body or condition of a `while` → (computation, name) of the `while`;
        without computations that several loops share.
      while_trips: source line of a loop that data may end → trip counts that it was
        planned with.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    loops: Mapping[str, tuple[str, str]]
    while_trips: Mapping[str, frozenset[int]] = field(default_factory=dict)


_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_BITS = re.compile(r"^(?:bf|[fsu])(\d+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")


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
    def item_bytes(self) -> int:
        """Bytes of an element, at least 1."""
        return HloArray(self.element, ()).bytes

    @property
    def bytes(self) -> int:
        bits = _ITEM_BITS.get(self.element)
        if bits is None:
            found = _BITS.match(self.element)
            if found is None:
                raise ValueError(f"unknown element type {self.element!r} in HLO")
            bits = int(found.group(1))
        return -(-self.size * bits // 8)


def arrays_of(text: str) -> tuple[HloArray, ...]:
    """Return the arrays of a type: one, or those of a tuple in order.

    Args:
      text: a type, as `f32[8,128]{1,0}` or `(f32[8], s32[])`.
    """
    return tuple(
        HloArray(name, tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip()))
        for name, dims in _ARRAY.findall(text)
    )


@functools.lru_cache(maxsize=1 << 14)
def type_bytes(text: str) -> int:
    """Return the bytes of a printed HLO type: `f32[8,128]{1,0}`, or a tuple of such."""
    return sum(array.bytes for array in arrays_of(text))


_COMMENT = re.compile(r"/\*.*?\*/")
_QUOTED = r'"(?:\\.|[^"\\])*"'
_METADATA = re.compile(
    rf",?\s*\bmetadata=\{{((?:[^\"{{}}]|{_QUOTED}|\{{[^{{}}]*\}})*)\}}"
)
_OP_NAME = re.compile(r'op_name="((?:\\.|[^"\\])*)"')
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%?([\w.\-]+)\s*$")
_OPENS = re.compile(r"[(\[{]")
# A Pallas kernel's metadata is JSON on lines of its own, within an instruction's.
_CONTINUES = re.compile(r'\n(?="|\}\})')


def parse_module(text: str) -> Module:
    """Parse the text of an HLO module.

    Raises:
      ValueError: the text is no HLO module, or has no entry computation.
    """
    lines = _CONTINUES.sub(" ", text).splitlines()
    header = next((x for x in lines if x.startswith("HloModule")), None)
    if header is None:
        raise ValueError("not the text of an HLO module: no line starts with HloModule")
    frames = parse_frames(lines)
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    has_mark = False
    body: dict[str, Instruction] | None = None
    for line in lines:
        if body is None:
            start = _COMPUTATION.match(line)
            if start is not None:
                name, body, root, has_mark = start.group(2), {}, "", False
                entry = name if start.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, body, root)
            body = None
        else:
            found = _INSTRUCTION.match(line)
            if found is not None:
                body[found.group(2)] = _instruction(found, frames)
                # Without a ROOT mark, the last instruction is the root.
                is_root = found.group(1) or not has_mark
                has_mark = has_mark or bool(found.group(1))
                root = found.group(2) if is_root else root
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Module(
        computations,
        entry,
        int(partitions.group(1)) if partitions else 1,
        _loops(computations),
    )


def _loops(computations: Mapping[str, Computation]) -> dict[str, tuple[str, str]]:
    places: dict[str, list[tuple[str, str]]] = {}
    for computation in computations.values():
        for instruction in computation:
            if instruction.opcode == "while":
                for role in ("condition", "body"):
                    where = places.setdefault(instruction.attribute(role), [])
                    where.append((computation.name, instruction.name))
    return {name: where[0] for name, where in places.items() if len(where) == 1}


def _instruction(found: re.Match[str], frames: Mapping[int, str]) -> Instruction:
    text = found.group(3)
    type_end = _type_end(text)
    opcode = _OPCODE.match(text, type_end)
    if opcode is None:
        raise ValueError(
            f"cannot read HLO instruction {found.group(0).strip()[:120]!r}"
        )
    close = _close(text, opcode.end() - 1)
    inner, attributes = text[opcode.end() : close], text[close + 1 :]
    if opcode.group(1) in ("constant", "parameter", "iota"):
        operands: tuple[str, ...] = (inner.strip(),)
    else:
        operands = tuple(_operand_names(inner))
    metadata = _METADATA.search(attributes)
    said = metadata.group(1) if metadata else ""
    if metadata is not None:
        attributes = attributes[: metadata.start()] + attributes[metadata.end() :]
    name = _OP_NAME.search(said)
    return Instruction(
        found.group(2),
        opcode.group(1),
        text[:type_end],
        operands,
        attributes,
        name.group(1) if name else "",
        source_of(said, frames),
    )


def _type_end(text: str) -> int:
    """Return the end position of the type at the start of the text."""
    if text.startswith("("):
        return _close(text, 0) + 1
    space = text.find(" ")
    return space if space >= 0 else len(text)


_BRACKET = re.compile(rf"{_QUOTED}|[()]")


def _close(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        if found.group() == "(":
            depth += 1
        elif found.group() == ")":
            depth -= 1
            if depth == 0:
                return found.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")


def _operand_names(text: str) -> Iterator[str]:
    """Yield the names in an operand list, with or without types before them."""
    text = _COMMENT.sub("", text)
    if not _OPENS.search(text):
        yield from (
            found.group(1) for x in text.split(",") if (found := _NAME.search(x))
        )
        return
    depth, start = 0, 0
    for i, char in enumerate(text + ","):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            name = _NAME.search(text[start:i])
            if name is not None:
                yield name.group(1)
            start = i + 1


_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_CALLED_MANY = re.compile(
    r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)


def called_names(instruction: Instruction) -> list[str]:
    """Return the names of the computations that an instruction calls."""
    names = _CALLED.findall(instruction.attributes)
    for many in _CALLED_MANY.findall(instruction.attributes):
        names += [x.strip().lstrip("%") for x in many.split(",") if x.strip()]
    return names


def contains(
    module: Module,
    name: str,
    test: Callable[[Instruction], Any],
    known: dict[str, bool],
) -> bool:
    """Whether a computation, or one that it calls, has an instruction of some kind.

    Args:
      module: the program.
      name: the computation; False for one that the program has not.
      test: whether an instruction is of the kind.
      known: cache of the answers to this test.
    """
    if name not in module.computations:
        return False
    if name not in known:
        known[name] = any(
            test(i) or any(contains(module, x, test, known) for x in called_names(i))
            for i in module.computations[name]
        )
    return known[name]

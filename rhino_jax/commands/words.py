"""Parsers of command-line words: sizes, meshes, specs; and flags in errors."""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from rhino_jax.errors import PinError, RhinoError, nearest
from rhino_jax.units import parse_bytes


EXIT_CODES = (
    "exit codes: 0 done; 1 no plan is feasible (`solve`: or none was found in time;"
    " `verify`: the compiled program is not as planned; `bench`: rows failed); 2 bad"
    " input"
)

PINS_HELP = (
    'fix a layout: PATH=SPEC, as "params[\'w1\']=None,model", "batch*=(data,model)"'
    " or \"model.py:61=P('data')\"; an empty SPEC replicates it; or a TOML or JSON file"
    " of them; may be given several times"
)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def shares(text: str) -> list[float]:
    """Parse `0.95` or `1,0.95` as numbers above 0."""
    return [positive(part) for part in text.split(",")]


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def size_bytes(text: str) -> int:
    """Parse `16GiB` or `12e9` as bytes."""
    value = parse_bytes(text)
    if value is None or not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive size; write 16GiB, 1.5GB or 12e9"
        )
    return round(value)


def gib(text: str) -> int:
    return round(positive(text) * 2**30) or 1


def mesh_axes(text: str) -> dict[str, int]:
    """Parse `data=4,model=2` as a mapping of axis name to size."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (x.strip() for x in part.partition("="))
        if not (name and equals and size.isdecimal() and int(size) > 0):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no mesh axis; write name=size, as data=4,model=2"
            )
        if name in mesh:
            raise argparse.ArgumentTypeError(f"axis {name!r} is given twice")
        mesh[name] = int(size)
    return mesh


def read_pins(words: Iterable[str]) -> dict[str, PartitionSpec]:
    """Parse a command line's pins, files included; later ones take precedence.

    Raises:
      PinError: a spec or a file cannot be read.
    """
    pins: dict[str, PartitionSpec] = {}
    for word in words:
        path, equals, text = word.rpartition("=")
        if equals:
            pins[path.strip()] = read_spec(text, word)
        else:
            entries = _pins_file(Path(word))
            pins |= {k: read_spec(v, f"{word}, key {k!r}") for k, v in entries.items()}
    return pins


def read_spec(given: Any, where: str) -> PartitionSpec:
    """Parse a spec of a command line or a file: `None,model`, `P('data')`, a list.

    Raises:
      PinError: it is none of these.
    """
    entries: Any = None
    if isinstance(given, str):
        bare = re.sub(r"^\s*(?:jax\.sharding\.)?(?:P|PartitionSpec)\s*\((.*)\)\s*$",
                      r"\1", given)  # fmt: skip
        quoted = re.sub(r"(?<!['\"\w])(?!None\b)([^\W\d]\w*)(?!['\"\w])", r"'\1'", bare)
        # Python concatenates strings that only a space separates; `!` is an error.
        quoted = re.sub(r"'\s+'", "' ! '", quoted)
        try:
            entries = ast.literal_eval(f"({quoted},)") if quoted.strip() else ()
        except (SyntaxError, ValueError):
            entries = None
    elif isinstance(given, list):
        entries = tuple(tuple(e) if isinstance(e, list) else e for e in given)
    if entries is None or not all(_is_entry(e) for e in entries):
        raise PinError(
            "`--pins`: this spec cannot be read.",
            where=where,
            numbers=f"got {given!r}",
            fix="write one entry per dim: an axis, None, or (axis,axis); as"
            " \"params['w1']=None,model\".",
        )
    return PartitionSpec(*entries)


def _is_entry(entry: Any) -> bool:
    several = entry if isinstance(entry, tuple) else (entry,)
    return entry is None or all(isinstance(name, str) for name in several)


def _pins_file(path: Path) -> dict[str, Any]:
    load: Callable[[str], Any] = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        entries = load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        raise PinError(
            f"`--pins`: {str(path)!r} is neither PATH=SPEC nor a file that exists."
            + nearest(path.name, names),
            where="--pins",
            fix="write \"params['w1']=None,model\", or the path of a TOML or JSON"
            " file.",
        ) from None
    except (OSError, ValueError) as error:
        raise PinError(
            "`--pins`: this file cannot be read.",
            where=str(path),
            numbers=str(error).splitlines()[0],
            fix='a TOML file has lines as "params[\'w1\']" = "None, model".',
        ) from None
    if not isinstance(entries, dict):
        raise PinError(
            "`--pins`: this file holds no mapping of paths.",
            where=str(path),
            numbers=f"got {type(entries).__name__}",
            fix='write {"params[\'w1\']": [null, "model"]}.',
        )
    return entries


_KEYWORDS = (
    *("memory_budget_bytes", "per_microbatch", "while_trips", "microbatches"),
    *("recompute", "storage", "time_limit_s", "compile_for", "hardware", "schedule"),
    *(
        "loops",
        "grouped",
        "stacks",
        "attention",
        "offload",
        "stages",
        "refine",
        "level",
        "pins",
        "seed",
        "mesh",
    ),
)
_KEYWORD = re.compile(
    rf"(?<![\w.'-])({'|'.join(_KEYWORDS)})"
    r"(=(?:'([^']*)'|(\{[^}]*\})|([\w.]+))?|\b(?= to \d))"
)
_AXIS = re.compile(r"'(\w+)': (\d+)")


def with_flags(error: RhinoError) -> str:
    """Return an error's text with flags: `--mesh a=2`, not `mesh={'a': 2}`."""
    return _KEYWORD.sub(_flag, str(error))


def _flag(match: re.Match[str]) -> str:
    flag = "--" + match[1].removesuffix("_bytes").replace("_", "-")
    text, mapping, word = match[3], match[4], match[5]
    if mapping is not None:
        axes = ",".join(f"{name}={size}" for name, size in _AXIS.findall(mapping))
        return f"{flag} {axes}" if axes else f"{flag} …"
    value = text if text is not None else word
    return flag if value is None else f"{flag} {value}"

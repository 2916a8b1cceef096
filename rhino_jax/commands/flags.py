"""Error messages with flags of the command line in place of Python keywords."""

from __future__ import annotations

import re

from rhino_jax.errors import RhinoError


_KEYWORDS = (
    *("memory_budget_bytes", "per_microbatch", "while_trips", "microbatches"),
    *("recompute", "storage", "time_limit_s", "compile_for", "hardware", "schedule"),
    *("stages", "refine", "level", "pins", "seed", "mesh"),
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

"""Executes what `plan.code` writes, and says which collectives come of it.

Run as a program, in a folder where the patch of the styles, if any, has been applied:
`run_code.py MODEL CODE…`; prints {"kind axes": bytes} of each as a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from rhino_jax.models import registry
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.places import place_on


def traffic(collectives: Any) -> dict[str, int]:
    """Bytes on the wire per device and step, by kind and axes."""
    found: Counter[str] = Counter()
    for c in collectives:
        found[f"{c.kind} {'+'.join(c.axes)}"] += c.bytes
    return dict(sorted(found.items()))


def compiled_traffic(model: str, code: str) -> dict[str, int]:
    """What a model compiles to as a module's text says."""
    written: dict[str, Any] = {}
    exec(compile(code, "plan_code.py", "exec"), written)
    mesh, work = written["mesh"], registry.get(model)
    args = work.abstract_args()
    with jax.set_mesh(mesh), _rules_of(written):
        lowered = written["jit"](work.step, *args).lower(*args)
    compilation = compile_lowered(lowered, mesh=mesh)
    target = place_on(mesh, None).target
    reading = read_compiled(compilation, tuple(mesh.shape.items()), target)
    return traffic(reading.collectives)


def _rules_of(written: dict[str, Any]) -> Any:
    rules = written.get("RULES") or [
        (name, tuple(axes) or None)
        for name, axes in written.get("logical_axis_rules", ())
    ]
    if not rules:
        return contextlib.nullcontext()
    import flax.linen

    return flax.linen.logical_axis_rules(rules)


if __name__ == "__main__":
    for code in sys.argv[2:]:
        print(json.dumps(compiled_traffic(sys.argv[1], Path(code).read_text())))

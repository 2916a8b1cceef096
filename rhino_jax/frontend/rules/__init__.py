"""The rules of JAX's primitives: importing this package registers all of them.

In: `registry.OpContext`: one op's shapes, types and parameters.
Out: `registry.OpRule`: its factors, FLOPs, whether it fuses, and its traits.
Order: `factors` (rules built dim by dim), `opaque` (nothing is known, or the grid of a
kernel), then a file for each family: `elementwise`, `reduce`, `dot`, `conv`, `gather`
and others.

To add an op: a function decorated with `@register(name, traits=…, local=…)`, in the
file of its family or in a new one, imported below. It returns an `OpRule`, whose
factors `parse_rule` reads from text or `factors.FactorList` builds dim by dim. Its
traits (in which operands it is linear, …) and its parameters on a part (`local`) hold
in all packages: nothing else tells ops apart by name (`tests/ir/test_traits.py` lists
exceptions). `rhino.check_rule` runs it on shards, `tests/frontend/rule_cases*.py` list
the calls, and `tests/ir/test_op_facts.py` compares traits with numbers.
"""

from __future__ import annotations

from rhino_jax.frontend.rules import (  # noqa: F401
    attention,
    conv,
    dot,
    elementwise,
    gather,
    linalg,
    opaque,
    random,
    reduce,
    reshape,
    rotate,
    shape,
)

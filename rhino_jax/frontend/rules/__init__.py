"""The rules of JAX's primitives: importing this package registers all of them.

In: `registry.OpContext`: one op's shapes, types and parameters.
Out: `registry.OpRule`: its factors, FLOPs, whether it fuses, and its traits.
Order: `factors` (rules built dim by dim), `opaque` (nothing is known), then a file for
each family: `elementwise`, `reduce`, `dot`, `conv`, `reshape`, `gather` and more.

To add an op: a function in the file of its family, or in a new file that is imported
below, decorated with `@register(name, traits=Traits(OpKind...))`. It returns an
`OpRule`, whose factors `parse_rule` reads from einsum-like text or
`factors.FactorList` builds dim by dim. Its traits hold in all packages: no other code
tells ops apart by name (`tests/ir/test_traits.py`). `rhino.check_rule` runs it on
shards; `tests/frontend/rule_cases*.py` list the calls that are checked. Where a shard
needs other parameters than the whole, `check/local.py` rewrites them.
"""

from __future__ import annotations

from rhino_jax.frontend.rules import (  # noqa: F401
    collective,
    conv,
    dot,
    dynamic,
    elementwise,
    gather,
    kernel,
    linalg,
    opaque,
    random,
    reduce,
    reshape,
    rotate,
    scatter,
    shape,
    sort,
    window,
)

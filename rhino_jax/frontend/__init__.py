"""Import of a user's function: function → jaxpr → `ir.Program`.

In: a function and its arguments, as arrays or shapes; nothing is computed.
Out: `trace.Traced`: jaxpr, program, and the trees of arguments and results.
Order: `parameters` and `leaves` (the call), `objects` (modules that hold arrays),
`trace` with `tracing` (the jaxpr), `split_dims` (jaxpr → jaxpr), `importer` (jaxpr →
program: `regions`, `known_values`, `provenance`, rules by `registry` and `rules`),
`pallas` and `manual` (ops with opaque bodies), `state` (results that replace arguments
in the next call), `weak_types` (equal traces). `check` tests rules on shards, `pin` is
an op of ours, `forms` has `rhino.choose`. To add an op, see `rules`.
"""

from __future__ import annotations

# Built-in rules are registered before any other import, so that users' rules override
# them.
from rhino_jax.frontend import rules as rules

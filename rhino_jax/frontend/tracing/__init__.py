"""Steps of tracing a user's function: unwrapping, captures, the trace, passes, ties.

In: a function, possibly wrapped in `jax.jit`; the mesh in context.
Out: its jaxpr, its captured values, and which results replace which arguments.
Order: `captured` (closures, `jax.new_ref`), `in_context` (the trace), `transforms`
(jaxpr → jaxpr) with `open_moves` (`integers`, `windows`), `leaks` (tracers that the
function stored).
"""

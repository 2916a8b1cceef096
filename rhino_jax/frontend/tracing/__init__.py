"""How a user's function is taken, named and run while it is traced.

In: a function, `jax.jit` and all; the mesh in context.
Out: its jaxpr, what it captured, and which results replace which arguments.
Order: `wrappers` (`jax.jit` taken off), `captured` and `captured_references` (closures,
`jax.new_ref`), `in_context` (the trace), `transforms` (jaxpr → jaxpr), `leaks` (tracers
that the function kept; `holders`: in what), `ties` (donated arguments, and results that
replace arguments).
"""

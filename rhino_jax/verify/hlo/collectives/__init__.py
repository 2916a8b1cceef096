"""Read every collective of a compiled program: kind, axes, bytes and trip count.

In: a `rhino_jax.verify.hlo.module.Module` and the axes of its mesh.
Out: `rhino_jax.verify.hlo.records.CompiledCollective`s.
Order: `groups` (devices → mesh axes; which values are replicated), `payload` (kind and
bytes; transfers between TPU slices; started here, finished there), `windowed` (windowed
einsums, made of permutes), `read` (all of them, by the operation that they belong to),
`repeated_sums` (wrong sums).
"""

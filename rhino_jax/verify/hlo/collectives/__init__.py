"""Read every collective of a compiled program: kind, axes, bytes and trip count.

In: a `rhino_jax.verify.hlo.module.Module` and the axes of its mesh.
Out: `rhino_jax.verify.hlo.records.CompiledCollective`s.
Order: `groups` (devices → mesh axes), `slices` (transfers between TPU slices),
`payload` (kind and bytes), `calls` (which computations run), `asynchronous` (started
here, finished there), `permutes`, `unrolled` and `windowed` (windowed einsums, made of
permutes), `naming` (which operation it belongs to), `read` (all of them);
`replication` (which values are replicated), `repeated_sums` (wrong sums).
"""

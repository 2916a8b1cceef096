"""Devices, links, and how a mesh lies on them.

In: `configs/hardware/*.toml`, or a file of the same format, or the devices present.
Out: `target.Target`, and `mesh.LaidMesh`: mesh axes with latency and bandwidth.
Order: `schema` (a file → a target), `files` (by name, path or
devices), `target` (devices and tiers of links), `lowering` (behaviour of compilers),
`topology` and `parts` (which links an axis lies on), `layout` (the mesh over them),
`ordering` (its devices in that order);
`compile_only` makes JAX devices for hardware that is not present, `emulated` keeps CPU
devices of one process from deadlocking.

To add hardware: one file in `configs/hardware/`, in the format that `schema` states,
each number with its source. A new kind of link is a topology in `layout` and in
`rhino_jax.cost.collectives`; new behaviour of a compiler is a field of `target.Device`.
"""

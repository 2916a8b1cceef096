"""Repeats, as a model's layers are, solved once.

In: the priced problem of one mesh (`rhino_jax.planner.search.mesh_problem`).
Out: its solution, with a choice for every node.
Order: `symmetry` (nodes that look alike, in surroundings that do, choose alike), `fold`
(one node stands for all of them), `solve_folded`, `unfold` (repeats that choose
differently, where memory binds).
"""

"""The engine: nodes that choose, pairs that cost, memory over time. Knows no programs.

In goes a `problem.Problem`: costs of every node's options, tables of pairs, memory of
nodes and pairs over intervals of time, and a limit. Out come one option per node, and
a bound that no choice is below. There are two callers: the planner, whose collectives
hide behind compute (`overlap`), and `rhino_jax.contest`.

Who does what, and why:

- Presolve takes away what needs no search, each step with its way back
  (`presolve.reduction.Core`). Elimination minimises nodes with at most two neighbours
  away: most of a jaxpr, whose memory is priced or ignored. Consistency, following and
  dominance (`presolve.simplify`) need forbidden pairs, and keep memory.
- Messages (`bounds.messages`) bound a problem whose memory is priced, and make choices
  that see far; they settle trees, and say little of what a hard limit costs.
- Moves (`moves.moves`) set a whole forest of nodes to its best at once, and so climb
  from any choice; `moves.repair` takes a choice back into the limit, node by node.
- Prices (`bounds.prices`) are the best that a Lagrangian relaxation of memory can do,
  found from the choices that were met. They bound, and tell which options matter.
- CP-SAT (`cpsat`) does what it is best at: the exact choice, with memory hard, among
  what the others left open (`moves.kernels`, `moves.neighbourhoods`), putting choices
  together (`moves.fusion`), and the proof where what is left is small.

The numbers of all of them, with units and what they were measured on, are one record:
`parameters`.

Order of the planner, `solve`: for each weight of what can hide (`bounds.weights`),
`pairwise` without memory; where the limit binds, `memory_search` prices it, and
`moves.fusion` puts the choices at the best prices together. `restricted` solves many
restrictions at once, for recipes; `least_peak` is for what does not fit.

Order of the contest, `solve_limited`: `presolve.simplify`, `moves.interval_prices` for
choices that fit, `bounds.time_prices` for bounds, `moves.kernels`,
`moves.neighbourhoods`, and CP-SAT on the whole.
"""

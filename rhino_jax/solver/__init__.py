"""The solver engine: nodes with options, pair costs, memory over time.

In goes a `problem.Problem`: costs of every node's options, cost tables of pairs, memory
of nodes and pairs over intervals of time, and a limit. Out come one option per node (an
assignment, `labels`), and a lower bound on the objective. It knows no programs; callers
are the planner, whose collectives hide behind compute (`overlap`), and
`rhino_jax.contest`.

The parts, and why:

- Presolve removes nodes and options exactly, and records how to restore them
  (`reduction.Core`). Elimination minimises out nodes with at most two neighbours: most
  of a jaxpr, if memory is relaxed or ignored. Consistency, following and dominance
  (`simplify`) need forbidden pairs, and preserve memory.
- Messages (`bounds.messages`) give lower bounds for relaxed memory, and assignments
  that take distant nodes into account; exact on trees, weak under a hard memory limit.
- Moves (`moves.moves`) optimise a whole forest of nodes at once, and so improve any
  assignment; `moves.repair` makes an assignment satisfy the limit, node by node.
- Elimination of all nodes (`moves.fusion.eliminate`) is exact, and fast where nodes
  have few options: most programs are nearly trees.
- Prices (`bounds.prices`) are the best Lagrange multipliers of memory, found from known
  assignments. They give bounds, and tell which options matter.
- CP-SAT (`cpsat`) optimises exactly, with hard memory, over what the others left open
  (`moves.neighbourhoods`), combines assignments (`moves.fusion`), and proves optimality
  of small problems.

The constants of all of them, with units and measurements, are in `parameters`.

Order of the planner, `solve`: for each weight of hidable time (`solve.Weights`),
`pairwise` without memory; if the limit binds, `memory_search` finds multipliers, and
`moves.fusion` combines the assignments at the best ones. `restricted` solves many
restrictions at once, for recipes; `least_peak` is for problems that do not fit.

Order of the contest, `solve_limited`: `simplify`, `bounds.time_prices` for assignments
that fit and for bounds, `moves.neighbourhoods`, and CP-SAT on the whole.
"""

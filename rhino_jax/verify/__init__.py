"""Compile a plan and compare the compiled program with the plan's predictions.

In: a plan or a hand-sharded function, and hardware to compile for.
Out: `results`: a `Verification`, `Audit` or `Check`, which show themselves.
Order: `places` and `targets` (where to compile; on emulated devices where there are
none), `compile` (in a process of its own for compile-only devices: an aborting compiler
does not end the notebook), `hlo` (compiled text → collectives, memory, work),
`matching` (predicted against compiled, with causes), `stages` (one program, or the
tasks of stages), `verification` (all differences), `verdict` (whether the plan holds).
`audit` compiles code that its user sharded by hand, `culprits` finds the shardings that
cause its collectives; `check` compares results with one device; `refine` compiles
several plans and takes the fastest.
"""

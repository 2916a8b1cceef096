"""Look at a program as a pass does, and write the program that it becomes.

In: a closed jaxpr and the `ir.program.Program` imported from it.
Out: a closed jaxpr of the same arguments, constants and results.
Order: `flatten` (calls inlined, regions kept, the equation of every op), `flat` (these
regions and ops), `numbers` (value numbering: equal values have one number), `emit`
(equations replaced), `retraced` (trace and import the new program),
`trips` (scans unrolled).

To add a pass, write (closed jaxpr, program, choice) → closed jaxpr: flatten it, decide
from `FlatRegion.ops`, `maker`, `readers` and the ops' rules and traits, and emit. Where
few equations change, `emit.substitute` replaces these. Where all may, in order or
twice, `retraced.retraced` traces a function that runs `FlatOp.bind` on an environment
of arrays by value id. Where values are records of arrays, `passes.region_walk` runs
regions on them. `passes.apply.PASSES` lists all passes in order.
"""

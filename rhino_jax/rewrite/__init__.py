"""Look at a program as a pass does, and write the program that it becomes.

In: a closed jaxpr and the `ir.program.Program` imported from it.
Out: a closed jaxpr of the same arguments, constants and results.
Order: `flat` (calls inlined, regions kept, the equation of every op), `numbers` (value
numbering: equal values have one number), `equations` (those of a jaxpr without a
program), `emit` (equations replaced), `retraced` (trace and import the new program).

To add a pass, write (closed jaxpr, program, choice) → closed jaxpr: `flat.flatten` it,
decide from `FlatRegion.ops`, `maker` and the ops' rules and traits, and emit. Where few
equations change, `emit.substitute` replaces these. Where all may, in order or twice,
`retraced.retraced` traces a function that runs `FlatOp.bind` on an environment of
arrays by value id: `bind` keeps names and source lines. Where values are records of
arrays, `frontend.regions.evaluate_ops` runs regions as they are. Never zip ops with
equations by hand. `passes.apply.PASSES` lists all passes in order.
"""

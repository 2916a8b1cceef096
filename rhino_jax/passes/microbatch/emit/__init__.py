"""Emit a program with its loops over micro-batches.

In: `flow.analysis.FlowResult`, and a `cut.MicrobatchCut`: which ops run in which loop.
Out: `outside.emitted`, a function of the program's inputs, to be traced.
Order: `pieces` (rows of a micro-batch, and outputs of all of them, accumulated),
`outside` (ops outside of loops, and the loops), `piece` (ops on a micro-batch, and
their regions).
"""

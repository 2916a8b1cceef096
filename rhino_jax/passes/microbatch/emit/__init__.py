"""The program with its loops over pieces of the batch, traced anew.

In: `flow.analysis.FlowResult`, and a `cut.MicrobatchCut`: what runs where.
Out: `outside.emitted`, a function of the program's inputs, to be traced.
Order: `pieces` (which rows a piece has), `outside` (what runs once, and the loops),
`piece` (ops on a piece), `local` (their parameters), `regions` (loops inside of it).
"""

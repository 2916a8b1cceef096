"""Dataflow analysis of micro-batches: which values are complete, sliced or partial.

In: a closed jaxpr and its `Program`, and which inputs hold the batch.
Out: `analysis.FlowResult`: the state of every value, how every op runs, and which ops
couple rows of the batch.
Order: `states` (and inputs that may hold the batch), `ops` (transfer functions of ops),
`regions` (carries of scans over rows, too), `analysis` (a whole program,
and batches of one row), `evaluated` (positions and counts of rows, and complete
values of which micro-batches compute slices).
"""

"""What values are to a loop over pieces of the batch: whole, cut, or partial.

In: a closed jaxpr and its `Program`, and which inputs hold the batch.
Out: `analysis.FlowResult`: the state of every value, how every op runs, and where rows
of the batch meet.
Order: `batch` (inputs that may hold it), `blocks` (the program, calls taken apart),
`states`, `linear` (ops that sums pass), `row_numbers` (look-ups of one's own row),
`ops` (what one op makes of its operands), `accumulated` (carries of loops over rows),
`regions`, `analysis` (a whole program), `single` (one whose batch is one row),
`generated` (whole values of which pieces make their own), `part` (of a program, alone),
`again` (sums that are recomputed, as those of the forward pass).
"""

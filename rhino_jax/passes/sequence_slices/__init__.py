"""The sequence of a micro-batch cut into slices, as TeraPipe runs causal models.

In: `staged.apart.Apart`, and the number of tokens of every slice.
Out: `sliced.SlicedBody`: the same micro-batch, slice by slice; or an error with the
line that lets a token see later ones.
Order: `states` (whole, rows, pairs of tokens), `bounds` (interval analysis of masks),
`later` (pairs whose column is after their row), `flow` (an op on rows, and on pairs),
`refused`, `opened` (layer scans unrolled; recomputed values), `analysis` (inputs, and a
whole micro-batch), `emit` (slices of arrays), `sliced`.
"""

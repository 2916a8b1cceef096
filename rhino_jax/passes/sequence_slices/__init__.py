"""The sequence of a micro-batch cut into slices, as TeraPipe runs causal models.

In: `staged.apart.Apart`, and the number of tokens of every slice.
Out: `sliced.SlicedBody`: the same micro-batch, slice by slice; or an error with the
line that lets a token see later ones.
Order: `flow` (whole values, rows, pairs of tokens; an op on them, by
`attention.masks`), `refused`, `opened` (layer scans unrolled; equal values), `analysis`
(inputs, and a whole micro-batch), `sliced` (slices of arrays; the whole).
"""

"""The sequence of a micro-batch cut in slices, as TeraPipe runs causal models.

In: `staged.apart.Apart`, and how many tokens every slice has.
Out: `sliced.SlicedBody`: the same piece, done slice by slice; or an error that says
which line lets a token see later ones.
Order: `states` (whole, rows, pairs of tokens), `bounds` and `bounding` (what is known
of masks), `corner` (masks by row and column), `later` (pairs whose column is after
their row), `reduced`, `flow` (an op on rows), `pairs` (on pairs), `refused`, `opened`
(loops over layers, one by one), `twins` (what is made again), `inputs`, `analysis` (all
of a piece), `cuts` (parts of arrays), `emit`, `sliced`.
"""

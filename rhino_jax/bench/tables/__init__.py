"""What a benchmark tells of its results: figures, tables, and the pages they go into.

In: results as `rhino_jax.bench.records` has them, of this run and of earlier ones.
Out: Markdown, and the lines of it that a README keeps.
Order: `figures` (of a whole suite), `table` (rows and cells), `summary` (a few lines),
`changes` (since an earlier run), `readme` (written into a checkout).
"""

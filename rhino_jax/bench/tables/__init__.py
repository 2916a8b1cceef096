"""Reports of a benchmark's results: figures, tables, and pages that contain them.

In: results as in `rhino_jax.bench.records`, of this run and of earlier ones.
Out: Markdown, and its lines for a README.
Order: `figures` (of a whole suite), `table` (rows and cells, a few lines for a README,
and changes since an earlier run), `readme` (written into a checkout).
"""

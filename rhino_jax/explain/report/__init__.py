"""Reports on plans, as text and HTML, and what reports of other results are made of.

In: the data of `rhino_jax.plan`; nothing here computes.
Out: one line, text and HTML.
Order: `section` (what sections are), `tables` (rows of values, collectives and source
lines), `step` (the simulated step, also for Perfetto), `story` and `stages` (sections
of one thing each), `views` (drawings), `text` and `html` (sections → output; results
that show themselves), `line`.

To add a report: one file that gives a tuple of `section.Section`, which `text` and
`html` show. To add an output format: one file next to them that takes the same tuple.
"""

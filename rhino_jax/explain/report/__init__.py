"""Plans, and all that is found on them, for people.

In: the data of `rhino_jax.plan` and `rhino_jax.verify`; nothing here computes.
Out: one line, text, HTML, and a line of progress.
Order: `values`, `collectives` and `folding` (rows), `step` (by the clock) and
`step_trace` (for Perfetto), `story`, `verification`, `audit`,
`check` and `changes` (sections of one thing each), `section` (what sections are),
`text` and `html` (sections → output), `line` and `progress`.

To add a report: one file that gives a tuple of `section.Section`, which `text` and
`html` show. To add an output format: one file beside them that takes the same tuple.
"""

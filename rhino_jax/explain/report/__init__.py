"""Reports on plans, verifications, audits and checks, as text and HTML.

In: the data of `rhino_jax.plan` and `rhino_jax.verify`; nothing here computes.
Out: one line, text and HTML.
Order: `tables` (rows of values, collectives and source lines), `step` (the simulated
step, also for Perfetto), `story`, `stages` and
`changes` (sections of one thing each), `section` (what sections are),
`text` and `html` (sections → output), `line`.

To add a report: one file that gives a tuple of `section.Section`, which `text` and
`html` show. To add an output format: one file next to them that takes the same tuple.
"""

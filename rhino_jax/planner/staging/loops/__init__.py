"""Loops over layers, split over stages: candidate numbers of parts.

In: a step that is to be planned in stages, its loops whole.
Out: stacks to be split, and their parts, the most even split first.
Order: `rows` (consecutive stages), `parts` (splits by the seconds of loops), `forms`
(splits of a step).
"""

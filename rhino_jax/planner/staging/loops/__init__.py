"""Loops over layers in parts: how many, and what is worth a look.

In: a step that is to be planned in stages, its loops whole.
Out: stacks to be cut, and into which parts, the most even first.
Order: `rows` (stages in a row), `parts` (on these, by what loops take), `forms` (of a
step).
"""

"""Drawings of plans in HTML and SVG, without a library.

Interactive plotting libraries for Jupyter need megabytes of script or a network, and
none works in Lab, classic, VS Code and a file alike; a few hundred lines of boxes do.

In: a plan; or quantities of several, or many points, to compare.
Out: `views.views_of`: sections with drawings for a report; `bars`, `scatter`.
Order: `boxes` (colours, bars, escaping), `timeline`, `memory`, `treemap`, `regions` and
`network` (one drawing of a plan each), `pipeline` (of one in stages), `bars`
(verification, audit, diff), `scatter` (sweep), `script` (sorting, filtering, copying:
of files alone, notebooks run none), `views`, `page` (all of it as one file).
"""

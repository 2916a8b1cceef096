"""Drawings of plans in HTML and SVG, without a library.

Interactive plotting libraries for Jupyter need megabytes of script or a network, and
none works in Lab, classic, VS Code and a file alike; a few hundred lines of boxes do.

In: a plan; or quantities of several, or many points, to compare.
Out: `views.views_of`: sections with drawings for a report; `bars`, `scatter`.
Order: `boxes` (colours, bars, escaping), `views` (timeline, memory, network, shards of
the largest arrays), `treemap` (values and regions), `bars` (verification, audit, diff),
`scatter` (sweep), `page` (all of it as one file, with a script for sorting, filtering
and copying: notebooks run none).
"""

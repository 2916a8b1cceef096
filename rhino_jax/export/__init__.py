"""A plan as Python source that does without rhino.

In: a plan, and the function as it was traced (`Plan.traced`) where its lines matter.
Out: `code.code_of`: a module's text; `patch.Patch`: a diff of the user's files.
Order: `pytrees` (specs as literals), `cotangents` and `places` (which values an
expression of the user's makes, going forward and backward), `chains` (their layouts),
`constraints` (what stands there), `patch` (their files with it), `logical` (names of
dims, rules), `parts`, `over_stages`, `styles` (one text per style), `code`.

To add a style: one function in `styles`, and its name in `STYLES`; tests compile what
it writes and compare collectives.
"""

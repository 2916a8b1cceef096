"""Export of a plan as Python source that does not need rhino.

In: a plan, and the function as it was traced (`Plan.traced`) where its lines matter.
Out: `code.code_of`: a module's text; `patch.Patch`: a diff of the user's files.
Order: `pytrees` (specs as literals), `places` (values that a user's expression produces
in the forward and backward pass), `constraints` (their layouts, as constraints),
`patch` (a diff that adds them), `parts` (of a text), `code` (one text per style; names
of dims, rules).

To add a style: one function in `code`, and its name in `STYLES`; tests compile what it
writes and compare collectives.
"""

"""Attention that a user's function writes out, in other forms.

In: a traced function, and the forms that the planner chooses.
Out: the attentions in it, as calls of forms; the function with kernels in their place.
Order: `masks` (evaluated on positions), `softmax` (facts of values), `written` (one
attention), `replaced` (a function), `sites` (where there are several forms).
"""

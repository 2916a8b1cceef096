"""Alternatives of one computation, of which the planner takes one at every call.

In: functions that compute the same, by name.
Out: a function; the calls of it in a trace (`calls.Forms`), and the traced function
again with other forms.
Order: `calls` (what a trace records), `choose` (`rhino.choose`), `attention`.
"""

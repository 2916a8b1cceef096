"""Several programs that share state, planned as one problem.

In: functions with example arguments by name, their weights, and keywords of `plan`.
Out: a plan of each, in which shared state has one layout.
Order: `programs` (what is asked), `layout` (which inputs are shared), `shared` (a
search on one mesh, a plan made of each), `together` (the call).
"""

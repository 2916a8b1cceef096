"""Several programs that share state, planned as one problem.

In: functions with example arguments by name, their weights, and keywords of `plan`.
Out: a plan of each program, with one layout of the shared state.
Order: `shared` (the request, the layout of inputs that are shared, the search on one
mesh, and the plan of each program), `together` (the public call).
"""

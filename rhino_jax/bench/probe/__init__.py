"""Small programs of every family of ops, predicted against compiled, worst first.

In: hardware with a topology, whose compiler is installed.
Out: a table, and a JSON file that a later run is compared with.
Order: `functions` (one to four ops each, by family), `variations` (as a gradient, in a
loop, in float32, …), `run` (plans, compiles, reads), `report` (tables).
"""

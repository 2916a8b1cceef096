"""One program on many machines: the cost of each configuration, and the best of them.

In: a function with example arguments, and a list of values for each varied option.
Out: `table.Sweep`: a `point.Point` for every configuration, with its plan on request.
Order: `point` (lists → configurations, and what each costs), `evaluate` (configurations
that share a model), `jobs` (the best mesh within every budget; passes chosen, too; the
same in other processes), `running` (here or in processes), `table` (text), `sweep` (the
call; another batch size: the function traced on other shapes).
"""

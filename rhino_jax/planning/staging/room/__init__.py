"""Whether stages have room for what none of them can do without.

In: a step that is to be planned in stages.
Out: nothing, or an error that says how much is lacking.
Order: `least` (of all stages together, whatever the cut).
"""

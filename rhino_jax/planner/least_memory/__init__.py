"""The smallest memory peak of any allowed variant of a program.

In: the search of a program, and which keywords leave its variants open.
Out: the variant with the smallest peak, or the error where that is over the budget.
Order: `variants` (passes, each with its plan of the smallest peak), `freed` (places
that couple the batch), `refused` (the error, with fixes).
"""

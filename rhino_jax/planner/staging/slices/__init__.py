"""Sequence slices that run one after the other (TeraPipe): their number and lengths.

In: `schedule="token-slices"`, a step in micro-batches, and its stage cut.
Out: `chosen.Slicing`, the stages' costs of every slice, for a few ways to slice.
Order: `asked` (the user's slices), `growth` (the part of an op's work that grows with
tokens, and that with pairs of tokens), `chosen`.
"""

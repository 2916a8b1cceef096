"""Sequences in slices that run one after the other: how many, and how long each is.

In: `schedule="token-slices"`, a step in micro-batches, and where it is cut into stages.
Out: `chosen.works_of`, what stages take for every slice, of a few ways to slice.
Order: `asked` (what the user says of slices), `growth` (what of an op's work is of a
token alone, and what of a token and those before it), `chosen`.
"""

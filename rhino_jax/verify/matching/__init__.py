"""Match predicted with compiled collectives and explain the differences.

In: two lists of collectives, and what the compiler did (`causes.Evidence`).
Out: `matcher.Difference`s, each with its cause in a sentence.
Order: `ledger` (what has not been matched yet), `identities` (the compiler's ways to do
the same), `causes`, `matcher` (one kind of match at a time), `differences`.
"""

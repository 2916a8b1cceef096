"""Match predicted with compiled collectives and explain the differences.

In: two lists of collectives, and what the compiler did (`ledger.Evidence`).
Out: `matcher.Difference`s, each with its cause in a sentence.
Order: `ledger` (what has not been matched yet, and causes), `identities` (the
compiler's ways to do the same), `matcher` (one kind of match at a time), `division`
(seconds of kernels → ops or lines), `times` (seconds by line).
"""

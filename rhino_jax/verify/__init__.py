"""What the compiler made of a plan, beside what the plan predicted.

In: a plan or a hand-sharded function, and something to compile for.
Out: `verification.Verification`, `audit.Audit`, `check.Check`.
Order: `places` and `targets` (where to compile; `emulate` where devices are missing),
`compile`, `hlo` (a package: compiled text → collectives, memory, work), `matching` with
`ledger` and `identities` (predicted against compiled), `differences` and `causes` (what
differs and why), `problems` (whether the plan holds), `verification` (all of it).
`audit` with `culprits` and `costs` does it for code sharded by hand, `check` compares
numbers with one device, `refine` asks the compiler which of several plans is best.
"""

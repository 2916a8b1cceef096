"""Compile a plan and compare the compiled program with the plan's predictions.

In: a plan or a hand-sharded function, and something to compile for.
Out: `verification.VerificationData`, `by_hand.audit.AuditData`, `check.CheckData`.
Order: `places` and `targets` (where to compile; `emulate` where devices are missing),
`compile` (`in_child` where devices are not here: a compiler that aborts ends no
notebook), `hlo` (compiled text → collectives, memory, work), `matching` (predicted
against compiled: what differs, and why), `made` (one program, or the tasks of
`stages`), `problems` (whether the plan holds), `verification`. `by_hand` does it for
code that its user sharded, `check` compares numbers with one device (`comparison`),
`refine` asks the compiler which of several plans is best.
"""

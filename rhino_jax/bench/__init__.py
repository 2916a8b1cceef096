"""The benchmark: every plan is compiled, and the compiled program is the judge.

In: a suite of `configs/bench/`: models on hardware, by methods.
Out: saved results (`store`), tables of them, and fitted or measured hardware files.
Order: `methods`, `checks` and `suite` (what to run), `planning` (a row's plans),
`child` and `process` (separate processes; compiled and cached programs),
`run` (cells one after the other), `records` and `versions` (results, and what they
depend on), `progress`; `rows` (suites that are timed instead), `tables`
(reports), `measure` and `fit` (rates of hardware), `command`; `probe` (small programs
of every family of ops); `holdout` and `newcomers` (models).
"""

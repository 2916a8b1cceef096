"""The benchmark: every plan is compiled, and the compiled program is the judge.

In: a suite of `configs/bench/`: models on hardware, by methods.
Out: saved results (`store`), tables of them, and fitted or measured hardware files.
Order: `methods`, `checks` and `suite` (what to run), `planning` (a row's plans),
`cells` (what is measured at once), `compiling` (a method on a row), `rows` (rows that
are timed instead), `run` (cells one after the other), `child` and `process` (separate
processes; compiled and cached programs), `records` and `versions` (results, and what
they depend on), `progress`, `timing`; `tables` (reports), `measure` and `fit` (rates of
hardware), `command`; `probe` (small programs of every family of ops); `holdout` and
`newcomers` (models).
"""

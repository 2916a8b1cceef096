"""The benchmark: every plan is compiled, and the compiled program is the judge.

In: a suite of `configs/bench/`: models on hardware, by methods.
Out: saved results (`store`), tables of them, and fitted or measured hardware files.
Order: `methods`, `checks`, `solution` and `suite` (what to run), `planning` and
`planned` (a row's plans), `compiling` and `programs` (compiled and cached programs),
`child` and `process` (separate processes), `cell` and `run` (cells one after the
other), `records` and `versions` (results, and what they depend on), `progress`; `rows`
and `stages` (suites that are timed instead), `tables` (reports), `rates` (of hardware),
`command`.
"""

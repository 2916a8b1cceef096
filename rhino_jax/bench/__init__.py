"""The benchmark: every plan is compiled, and the compiled program is the judge.

In: a suite of `configs/bench/`: models on hardware, by methods.
Out: kept results (`store`), tables of them, and fitted or measured hardware files.
Order: `methods`, `checks`, `solution` and `suite` (what to run), `planning` and
`planned` (a row's plans), `compiling` and `programs` (compiled, and kept), `child` and
`process` (in processes of their own), `cell` and `run` (one after the other), `records`
and `versions` (what was found, and on what it depends), `progress`; `rows` and `stages`
(suites that are timed instead), `tables` (what is told), `rates` (of hardware),
`command`.
"""

"""Several processes, one plan: what they tell each other through JAX's coordination
service before anything is compiled, and while stages run.

In: a traced function, what is asked for, and what the first process makes.
Out: the same plan in all of them, or a `ProcessError` that names the first difference
or the process that is lost.
Order: `service` (keys and values), `leaving` (after a loss), `signs` (of life),
`meeting` (values put, and waited for), `listing` (what is compared, line by line),
`agree`; `across` (arrays on devices of several), `running` (steps in stages).
"""

"""Let several processes agree on one plan, before compiling and while stages run.

They communicate through JAX's coordination service.

In: a traced function, the user's options, and the first process's plan.
Out: the same plan in all of them, or a `ProcessError` that names the first difference
or the lost process.
Order: `service` (key-value store, and exit after a loss), `signs` (heartbeats),
`meeting` (values put, and waited for), `listing` (compared line by line),
`agree`; `across` (arrays on devices of several), `running` (steps in stages).
"""

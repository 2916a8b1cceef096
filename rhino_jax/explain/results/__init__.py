"""Classes that users get: plans, verifications, audits, checks and diffs, with methods.

In: the data of `rhino_jax.plan` and `rhino_jax.verify`.
Out: the same fields, in classes with methods; each calls a function of another package,
or shows the sections that its file makes.
Order: `dress` (data → class with methods), `verification`, `check` and `diff`,
`explored` (methods that plan or search again), `plan`, `audit`.
"""

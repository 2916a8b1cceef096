"""What users hold of plans and of what is found on them: the data, and what acts.

In: the data of `rhino_jax.plan` and `rhino_jax.verify`.
Out: the same fields, in classes with methods; each calls a function of another package.
Order: `dress` (data → face), `verification`, `check` and `diff`, `explored` (what
asks a plan's origin), `plan`, `audit`.
"""

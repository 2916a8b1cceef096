"""Results of compiling and running a plan, with their displays.

In: records of what was predicted, compiled and measured.
Out: the objects that `plan.verify`, `plan.check` and `rhino.audit` return.
Order: `verification`, `check`, `audit`: each the data, then the sections of its report.
"""

"""Groups of devices that are planned: once for all that are alike, and what they cost.

In: the tasks of a group as one program, and what the search found for them.
Out: seconds and bytes of every task, and of what passes between groups.
Order: `alike` (which groups do the same), `working` (what tasks take while they run),
`costs` (of tasks, and of what is sent).
"""

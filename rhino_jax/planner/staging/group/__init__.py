"""Submeshes as planned: equivalent ones once, with the costs of their tasks.

In: the tasks of a submesh as one program, and the search's result for it.
Out: seconds and bytes of every task, and of transfers between submeshes.
Order: `alike` (equivalent submeshes), `crossing` (layouts of sent values), `working`
(working memory of tasks), `costs` (of tasks, and of transfers).
"""

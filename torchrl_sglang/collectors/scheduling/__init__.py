"""Decides which groups run and which make up a batch. Pure, apart from ``prompts.py``.

``admission.py`` has the bounds and ``pace.py`` the time at which a group starts;
``group_pool.py`` applies them to the groups of a collection. ``prompt_order.py`` knows
which prompt starts next and which are done, and ``prompts.py`` reads them.
``failures.py`` says which groups that failed start again, and when the collection ends.

``loader_batches.py::split_batch`` makes tasks of the batches of a ``DataLoader``.
"""

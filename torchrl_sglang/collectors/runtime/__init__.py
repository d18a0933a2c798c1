"""Runs groups on an event loop of its own, and hands them to the trainer.

``contract.py`` is the interface between a collector and its groups; ``columns.py`` has
the names and values of the columns of their rows, ``versions.py`` the versions of
their tokens. ``collection.py`` starts groups that the pool of ``scheduling/`` admits.
``batches.py`` takes complete groups as batches or writes them to a replay buffer, whose
sampler reads ``consumer_version.py``; ``stale_mask.py`` excludes tokens that are too
old. ``group_events.py`` publishes the life of each group to subscribers, and
``stats.py`` finds the bottleneck of the run.

A figure of the statistics is in ``stats.py``; ``versions.py::PolicyVersions`` detects
the weights of another sender.
"""

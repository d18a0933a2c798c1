"""Runs groups on an event loop of its own, and hands them to the trainer.

``collection.py`` starts what the pool of ``scheduling/`` admits, whatever it is made of
(``contract.py``). ``batches.py`` takes complete groups as batches or writes them to a
replay buffer, whose sampler reads ``consumer_version.py``; ``stale_mask.py`` excludes
tokens that are too old. ``group_events.py`` publishes the life of each group to
subscribers, and ``stats.py`` says what bounds the run.

A figure of the statistics is in ``stats.py``.
"""

"""GRPO in one call, and the parts of its loop.

``grpo`` holds the call and the loop, ``arguments`` checks what it was given.
``learner`` takes the optimizer steps of a batch in the ``passes`` that it is cut into,
with what ``optimizers`` makes; ``models`` loads and shards what is trained, ``ranks``
are the processes that do so. ``checkpoints`` and ``report`` write to the run's folder;
``methods`` is the table of losses.
"""

"""GRPO in one call, and the parts of its loop.

``grpo`` holds the call and the loop; ``learner`` takes the optimizer steps of a batch,
``models`` loads and shards what is trained, ``checkpoints`` and ``report`` write to the
run's folder, ``methods`` is the table of losses.
"""

"""New weights to the servers. Knows torch.distributed, and the engine's contract.

``source.py`` (with ``peft_source.py``) turns what a caller calls weights into tensors,
``names.py`` finds the servers' names for them, ``ranks.py`` has several ranks send as
one, ``buckets.py`` lays them out,
``transports/`` carries the bytes, ``session.py`` orders pause, send and resume, and
``scheme.py`` with ``sender.py`` and ``receiver.py`` is TorchRL's view of it all.
"""

"""New weights to the servers. Knows torch.distributed, and the engine's contract.

``source.py`` turns a model into named tensors, ``buckets.py`` lays them out,
``transports/`` carries the bytes, ``session.py`` orders pause, send and resume, and
``scheme.py`` with ``sender.py`` and ``receiver.py`` is TorchRL's view of it all.
"""

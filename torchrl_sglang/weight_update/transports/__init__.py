"""Transports of weights to the servers: one file each, and ``registry`` of them all.

``base`` has the protocol; ``placement`` tells which servers share the weights' GPU.

A transport is a file with a ``base.py::WeightTransport`` and its options, and a row of
``registry.py::_ROWS``; ``weight_update/plan.py::choose`` decides for ``"auto"``.
``disk.py::CheckpointTransport`` recovers servers, and ``delta.py::why_full`` decides
between changes and everything.
"""

"""Encodings of served tensors, between sources and transports.

An encoding maps each tensor to one or several, whose names, types and shapes are known
before the first byte is sent. ``base.py`` has the contract and the stage itself, and
``registry.py`` the encodings.

An encoding is a file with a ``base.py::WeightEncoding``, and a row of
``registry.py::_ROWS`` if it has a name. Models with FP8 are in
``backends/launch/block_fp8.py::FAMILIES``.
"""

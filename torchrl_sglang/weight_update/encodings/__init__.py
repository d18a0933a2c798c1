"""Encodings of served tensors, between sources and transports.

An encoding maps each tensor to one or several, whose names, types and shapes are known
before the first byte is sent. ``base.py`` has the contract and the stage itself, and
``registry.py`` the encodings.
"""

"""Transports of weights to the servers: one file each, and ``registry`` of them all.

``base`` has the protocol; ``placement`` tells which servers share the weights' GPU.
"""

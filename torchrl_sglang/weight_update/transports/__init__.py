"""How weights reach the servers: one file per transport, and ``registry`` of them all.

``base`` has the protocol; ``placement`` tells which servers share the weights' GPU.
"""

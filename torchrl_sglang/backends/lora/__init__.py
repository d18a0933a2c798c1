"""LoRA adapters of the servers.

``payload`` reads and checks an adapter; ``registry`` loads it into every server and
keeps the wanted set, which ``wanted`` computes from what servers hold; ``retirement``
drops an adapter after its last request; ``names`` makes and parses the names of loads.
"""

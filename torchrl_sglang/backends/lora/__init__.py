"""LoRA adapters: ``payload`` reads and checks their tensors, and ``names`` parses
their names in requests and on servers. ``fleet`` loads and drops them.
"""

"""What a LoRA adapter is: ``payload`` reads and checks its tensors, and ``names`` has
the names by which requests and servers know it. ``fleet`` loads and drops it.
"""

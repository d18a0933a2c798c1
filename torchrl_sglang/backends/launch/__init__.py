"""Starting servers and the router: from arguments to commands, processes and ports.

``plan`` decides, ``process`` starts and stops, ``cpu`` does without an accelerator.
"""

"""HTTP communication with servers.

``http`` sends requests, and ``control`` has a method per verb of SGLang. ``fan_out``
calls many servers with a bounded number of calls in flight, ``capabilities`` detects a
server's capabilities, ``model_info`` reads the served model. Inputs are a URL and a
timeout; the result is JSON or a typed error. Imports only ``support``.

A capability is read in ``capabilities.py::interpret``, and another route of a server is
a method in ``control.py``.
"""

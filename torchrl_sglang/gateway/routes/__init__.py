"""The gateway's HTTP routes.

A route is a line of ``app.py::make_app``, and of ``docs/source/reference/gateway.rst``.
"""

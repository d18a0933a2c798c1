"""Protocols of the gateway's clients, each in a file and a row of the registry.

``base.py`` defines a dialect, ``registry.py`` lists them. A dialect parses a body into
a :class:`~torchrl_sglang.gateway.request.Request` and formats turns as its answer;
sessions, their keys, generation, retries and delivery are common to all.

A dialect is a file with a ``base.py::Dialect``, and a row of ``registry.py::DIALECTS``.
A field is a row of its tables: ``_SAMPLING``, ``_ABOUT`` (without effect),
``_REFUSED``, or ``_HINTS`` for variables of chat templates;
``docs/source/reference/gateway.rst`` lists it.
"""

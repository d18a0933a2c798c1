"""Protocols that the gateway's clients speak, each in a file and a row of the registry.

``base.py`` says what a dialect is, ``registry.py`` lists them. A dialect reads a body
into a :class:`~torchrl_sglang.gateway.request.Request` and writes turns as its answer;
sessions, keys of sessions, generation, retries and delivery are the same for all.
"""

"""Talking to servers: ``http`` carries requests, ``control`` has a method per verb.

``capabilities`` and ``model_info`` find out what a server can do and what it serves,
``liveness`` whether it hangs. Requests come in with a URL and a timeout; JSON or a
typed error comes out. Imports ``support`` only.
"""

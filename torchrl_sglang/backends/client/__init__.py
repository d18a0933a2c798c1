"""Talking to servers: ``http`` carries requests, ``control`` has a method per verb.

``capabilities`` finds out what a server can do, ``liveness`` whether it hangs;
``model_files`` and ``model_info`` read the served model. Requests come in with a URL
and a timeout; JSON or a typed error comes out. Imports ``support`` only.
"""

"""Talking to servers: ``http`` carries requests, ``control`` has a method per verb.

``fan_out`` calls many servers with a bounded number of calls in flight,
``capabilities`` finds out what a server can do, ``model_info`` reads the served model.
Requests come in with a URL and a timeout; JSON or a typed error comes out. Imports
``support`` only.
"""

"""Talking to one server: HTTP, control calls, what it can do and what it serves.

A call comes in with a URL and a deadline; JSON, or a typed error, comes back.
"""

"""An endpoint for agents that records what a policy read and wrote, token by token.

A client's request is read by its dialect (``dialects/``: OpenAI, Anthropic), joined by
tokens to an earlier turn of its ``session`` (with ``chat/``), generated (``policy``),
kept (``session``, ``store``) and answered in the dialect again (``server``). What a
session holds is exported as TorchRL's containers (``export``).
"""

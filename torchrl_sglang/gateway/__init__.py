"""An endpoint for agents that records a policy's prompts and responses by token.

A dialect reads a client's request (``dialects/``: OpenAI, Anthropic); it is joined by
tokens to an earlier turn of its ``session`` (with ``chat/``), generated (``policy``),
kept (``session``, ``store``) and answered in the dialect again (``server``). ``export``
converts sessions to TorchRL's containers.
"""

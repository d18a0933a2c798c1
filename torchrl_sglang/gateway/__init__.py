"""An endpoint for agents that records a policy's prompts and responses by token.

A dialect reads a client's request (``dialects/``: OpenAI, Anthropic); it is joined by
tokens to an earlier turn of its ``session`` (with ``chat/``), generated (``policy``),
kept (``session``, ``store``) and answered in the dialect again (``routes/``).
``export`` converts sessions to TorchRL's containers; ``agent_groups`` are the groups of
a collector.

``responder.py`` makes a turn and ``keeping.py`` keeps it; ``registry.py`` and
``routes/access.py`` have the keys and the addresses of sessions, ``credit.py`` the
trained turns and their rewards, ``branches.py`` the reasons of branches. A column of a
batch is in ``export.py::to_rows``, streamed content of another family of models a row
of ``drafts.py::CALL_MARKS``; other tables of the store need another
``store.py::FORMAT``.
"""

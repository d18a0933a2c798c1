"""Sends new weights to the servers; knows torch.distributed and the engine's contract.

``scheme`` is TorchRL's view: it takes ``options`` and an engine, and makes a
``sender``. For each update the ``plan`` resolves the caller's weights into a source
(``sources/``; several ``ranks`` gather it together), maps it to the served names, and
chooses encoding (``encodings/``) and transport (``transports/``).
``backends/session.py`` orders pause, send and resume. ``verify`` compares afterwards.

An option of all updates is a field of ``options.py::SchemeOptions``; ``"auto"`` chooses
a transport in ``plan.py::choose``. ``new_servers.py`` sends weights to servers that
joined since the last update. Ranks take part by ``ranks.py::Ranks``, as in
``transports/handle_ranks.py::lead``.
"""

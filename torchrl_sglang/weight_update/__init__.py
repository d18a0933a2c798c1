"""Sends new weights to the servers; knows torch.distributed and the engine's contract.

``scheme`` is TorchRL's view: it takes ``options`` and an engine, and gives
a ``sender``. For each update the sender resolves what it was given into a source
(``sources/``; on several ``ranks`` they gather it together), maps that to the served
names (``weights``), and hands it with a transport (``transports/``) to ``session``,
which orders pause, send and resume. ``verify`` compares afterwards.

An option of all updates is a field of ``options.py::SchemeOptions``. ``new_servers.py``
sends weights to servers that joined since the last update. Ranks take part by
``ranks.py::Peers``, as in ``transports/handle_ranks.py::lead``.
"""

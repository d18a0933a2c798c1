"""The engine: HTTP and processes, without TensorDict and torch.distributed.

``async_sglang`` is the users' object; ``contract`` is its interface for the layers
above. A call flows through ``generation`` (requests -> responses), which picks a server
in ``fleet`` and sends through ``client``. ``lora`` reads adapters, which ``fleet``
loads, and ``launch`` starts servers.

Another method for the layers above is one of ``contract.py::RLSGLangEngine``;
``torchrl_calls.py`` has the calls of TorchRL's own engines, and ``session.py`` alone
orders the calls of a weight update.
"""

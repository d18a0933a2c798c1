"""The engine: HTTP and processes. It knows no TensorDict and no torch.distributed.

``async_sglang`` is the object that users hold; ``contract`` says what the layers above
need of it. A call flows through ``generation`` (requests -> responses), which
asks ``fleet`` for a server and sends through ``client``. ``lora`` reads adapters, which
``fleet`` loads, and ``launch`` starts servers.
"""

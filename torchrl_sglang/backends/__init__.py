"""The engine: HTTP and processes. It knows no TensorDict and no torch.distributed.

``async_sglang`` is the object that users hold; ``base`` says what the layers above need
of it. A call flows through ``generation`` (arguments -> requests -> responses), which
asks ``fleet`` for a server and sends through ``client``. ``lora`` loads adapters,
``launch`` starts servers, ``support`` is used by all.
"""

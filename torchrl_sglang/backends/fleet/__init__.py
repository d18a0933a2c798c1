"""The servers of one engine, and the version of their weights.

``state`` is all that is known of them, ``observe`` asks them, ``reconcile`` decides
what follows, without servers, and ``loop`` does it: observe, reconcile, act.
``membership.Fleet`` keeps the state. ``replica`` describes a server and the router,
``routing`` chooses a server for a request, ``weights_state`` has the versions and the
consistency of the weights, and ``sleep`` releases GPU memory.

LoRA adapters are a part of the state: ``adapters`` says which are wanted, loaded and
retiring, ``adapter_events`` what follows, ``adapter_calls`` asks servers and does it,
and ``adapter_registry`` is what callers and requests use.
"""

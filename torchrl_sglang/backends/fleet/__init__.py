"""The servers of an engine, and the version of their weights.

``state`` holds the known state, ``observe`` polls servers, ``reconcile`` computes the
next state without I/O, and ``loop`` runs the cycle: observe, reconcile, act.
``membership.Fleet`` keeps the state. ``replica`` describes a server and the router,
``routing`` chooses a server for a request, ``weights_state`` has the versions and the
consistency of the weights, and ``sleep`` releases GPU memory.

LoRA adapters are a part of the state: ``adapters`` has the wanted, loading and retiring
adapters, ``adapter_events`` their transitions, ``adapter_calls`` the requests to
servers, and ``adapter_registry`` the interface for callers and requests.

Decisions are pure: ``reconcile.py::reconcile`` on requests, restarts and addresses,
``resize_events.py`` on joining and leaving servers, ``adapter_events.py::advance`` on
adapters, and ``weights_state.py::ServedWeights`` on consistency. Copies of the engine
follow new addresses by ``replica.py::Directory``.
"""

"""Makes groups: several conversations about one element of the prompts.

``make.py`` chooses one of three kinds: ``functions.py`` runs the ``conversations.py``
of plain functions, with ``tools.py`` and ``rewards.py``, and ``rows.py`` writes them;
``agents.py`` runs agents that talk to a gateway; ``environments.py`` steps
environments of TorchRL. ``versions.py`` counts the weight updates for all of them,
``user_functions.py`` names a function of the user in errors, and ``endings.py`` calls
what a conversation left.

Another kind of groups is a class with the methods of
``collectors/runtime/contract.py::Groups``. Reward functions of another library are read
by ``reward_functions.py::_read``; ``versions.py::PolicyVersions`` detects the weights
of another sender, and ``deterministic.py`` refuses conversations that cannot be
repeated.
"""

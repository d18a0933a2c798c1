"""Makes groups: several conversations about one element of the prompts.

Each kind of conversation has a class: ``functions.py`` runs the ``conversations.py``
of plain functions, with ``tools.py`` and ``rewards.py``, and ``rows.py`` writes them;
``environments.py`` steps environments of TorchRL; ``gateway/agent_groups.py`` runs
agents. ``make.py`` takes a kind's arguments from a collector's.
``user_functions.py`` names a function of the user in errors, and ``endings.py`` calls
the clean-up of conversations.

Another kind of groups is a ``collectors/runtime/contract.py::GroupKind``, which makes a
``collectors/runtime/contract.py::GroupMaker``; users pass it as ``groups=``. Reward
functions of another library are read by ``reward_functions.py::_read``, and
``deterministic.py`` refuses conversations that cannot be repeated.
"""

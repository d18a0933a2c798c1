"""Agents made of other libraries' environments, which bring tasks and scores.

:class:`.VerifiersAgent` runs environments of `verifiers` in a Python of their own,
:class:`.InspectAgent` a task of Inspect. Each has the tasks as ``prompts()``, and is
itself the agent. A library is imported when its adapter is made.

Another library is a file here, a client in ``test/agents/clients``, and pins in
``test/agents/requirements``.
"""

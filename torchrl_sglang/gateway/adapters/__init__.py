"""Agents made of other libraries' environments, which bring tasks and scores.

:class:`.VerifiersAgent` runs an environment of `verifiers`, :class:`.InspectAgent` a
task of Inspect. Each has the tasks as ``prompts()``, and is itself the agent. They
import their library when they are made, and of this package its errors alone.

Another library is a file here, a client in ``test/agents/clients``, and pins in
``test/agents/requirements``.
"""

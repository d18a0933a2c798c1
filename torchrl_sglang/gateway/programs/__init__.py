"""Programs as agents: any command, in its own process tree or container.

:class:`.AgentProgram` (``program``) is called like any agent. It fills in the command
and the variables of a task (``templates``), runs them as a process tree bound to its
owner (``process``), optionally in a container (``container``), and passes the output to
the user's reward function.
"""

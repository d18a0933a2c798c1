"""Agents that are programs: any command, in a process tree or a container of its own.

:class:`.AgentProgram` (``program``) is called as any agent is. It fills in the command
and the variables of a task (``templates``), has them run as a process tree that ends
with its owner (``process``), in a container if one is asked for (``container``), and
gives what the program wrote to the user's reward function.
"""

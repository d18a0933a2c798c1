"""Starting servers and the router.

``launch`` starts an engine's servers by a ``Launcher``, and then their router. The
launcher for this machine (``local``) makes a ``server_command`` from a server's
arguments (``vllm_arguments``, ``gpus``, ``ports``, ``environment``) and runs it as a
``process`` under ``watchdog``; ``cpu`` has the additions for a machine without a GPU.
"""

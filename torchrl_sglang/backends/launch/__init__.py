"""Starting servers and the router.

``launch`` starts an engine's servers by a ``Launcher``, and then their router. The
launcher for this machine (``local``) makes a ``server_command`` from a server's
arguments (``vllm_arguments``, ``gpus``, ``ports``, ``environment``) and runs it as a
``process`` under ``watchdog``; ``cpu`` has the additions for a machine without a GPU.

Another place for servers is a file with a ``launcher.py::Launcher`` and its
``launcher.py::Placement``, and a row of ``make.py::PLACEMENTS`` if it has a name. An
option of Ray is a field of ``ray_launcher.py::RayLauncher`` and of
``ray_placement.py::Demand``, and an argument of vLLM a row of
``vllm_arguments.py::RENAMED``, ``INERT`` or ``REFUSED``. Variables of the trainer are
hidden by ``environment.py::LAUNCHER_VARIABLES``.
"""

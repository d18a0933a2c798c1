"""Set-up of SGLang on a machine without an accelerator.

``install.py`` makes the environment in which :mod:`torchrl_sglang.backends.launch.cpu`
starts servers, with the pins of ``requirements.txt``; ``packages.py`` runs uv. Both run
before anything else is installed, with only the standard library.
"""

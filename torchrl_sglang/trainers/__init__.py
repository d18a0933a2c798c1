"""GRPO in one call, and the parts of its loop.

``grpo`` holds the call and the loop, ``run`` the parts and the loop's steps. A run is
described by four frozen objects, which are made of the call's arguments and make its
parts: ``serving`` the engine and the policy, ``collecting`` the collectors,
``training`` the model and the learner, ``records`` checkpoints and logger.
``arguments`` checks what the call was given.

``learner`` takes the optimizer steps of a batch in the ``passes`` that it is cut into,
with what ``optimizers`` makes; ``models`` loads and shards what is trained, ``ranks``
are the processes that do so. ``checkpoints`` and ``report`` write to the run's folder;
``methods`` is the table of losses.

A method is a row of ``methods.py::METHODS`` and a logger a row of
``loggers.py::LOGGERS``; ``tasks.py::check_prompts`` checks tasks before servers start.
``clipping.py`` clips gradients, and ``progress.py::choose_mode`` chooses how progress
is shown. ``examples/grpo/train.py::convert`` reads runs from YAML files.
"""

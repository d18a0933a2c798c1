"""GRPO in one call, and the parts of its loop.

``grpo`` holds the call and the loop, ``run`` the parts and the loop's steps. Four
objects read the call's arguments and make the parts: ``serving`` the engine and the
policy, ``collecting`` the collectors, ``training`` the model and the learner,
``records`` checkpoints and logger.

``learner`` takes the optimizer steps of a batch in ``passes`` over its tokens, with an
optimizer of ``optimizers``; ``models`` loads and shards the model, and ``ranks`` are
the processes that share it. ``checkpoints`` and ``report`` write to the run's folder;
``methods`` is the table of losses.

An argument of the call is a field of ``arguments.py::RunArguments``, with its default,
check and documentation, of which ``GRPO`` has its signature and docstring.
``placement.py`` checks servers, ``sampling.py`` sampling parameters, and
``collector_checks.py`` functions and a user's collector. A method is a row of
``methods.py::METHODS`` and a logger a name of ``loggers.py::LOGGERS``;
``tasks.py::check_prompts`` checks tasks before servers start. ``clipping.py`` clips
gradients, and ``progress.py::choose_mode`` chooses how progress is shown.
``examples/grpo/train.py::convert`` reads runs from YAML files.
"""

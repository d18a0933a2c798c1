"""Off-policy correction for TorchRL's losses.

``formulas.py`` has the formulas, tensors in and tensors out; ``config.py`` the choice
of methods and verl's presets; ``correct.py`` applies a configuration to the log-probs
of a batch, and ``metrics.py`` measures how far off-policy it is. ``transform.py`` is a
TorchRL transform, which reads a batch with ``columns.py`` and writes the inputs of
``GRPOLoss``; ``losses.py`` has TorchRL's losses with corrections. ``support.py`` reads
the sampling distributions of tokens, and ``token_terms.py`` computes log-probs over
them; ``sampling.py`` does so for TorchRL's losses.

A method of correction is a formula, an argument of
``config.py::RolloutCorrectionConfig`` and its use in ``correct.py::correct``; a preset
is a row of ``config.py::PRESETS``, and an advantage a row of
``advantages.py::ADVANTAGES``. Routed experts of a family of models are found by
``routers.py::find_routers``; ``packing.py::why_padded`` and ``attention.py`` decide
whether a model reads several sequences in one row, and ``tree.py`` finds what these
share.
"""

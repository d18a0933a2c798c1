"""Off-policy correction for TorchRL's losses.

``formulas.py`` has the formulas, tensors in and tensors out; ``config.py`` the choice
of methods and verl's presets; ``correct.py`` applies a choice to the log-probs of a
batch, and ``metrics.py`` measures how far off-policy it is. ``transform.py`` is a
TorchRL transform that reads a batch with ``columns.py`` and writes what ``GRPOLoss``
reads; ``losses.py`` has TorchRL's losses with corrections. ``support.py`` reads what
tokens were drawn from, and ``token_terms.py`` computes log-probs over it;
``sampling.py`` does it for TorchRL's losses.
"""

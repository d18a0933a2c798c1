"""Resolves the caller's weights into named tensors of the served model.

``resolve`` makes a ``Source`` of a module, a state dict, a TensorDict, pairs or a
function that yields pairs; ``peft`` makes one of a model with adapters, or of an
adapter alone. ``served`` maps a source's names to the server's.

Another source is a file that returns a ``base.py::Source``, and a branch of
``resolve.py::find_source``. ``fingerprints.py`` detects training since an update.
"""

"""Resolves what a caller gives as weights into named tensors of the served model.

``resolve`` makes a ``Source`` of a module, a state dict, a TensorDict or pairs;
``exporter`` of a function that yields pairs, ``peft`` of a model with adapters to
merge, ``adapter`` of a LoRA adapter alone. ``served`` maps a source's names to the
server's.
"""

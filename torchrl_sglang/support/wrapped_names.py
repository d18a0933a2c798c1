"""Names of tensors inside wrappers of single layers."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Name parts of torch.compile, activation checkpointing and FSDP."""


def without_wrappers(name: str) -> str:
    """Returns a tensor's name without the wrappers around its layers.

    Examples:
        >>> without_wrappers("model.layers.0._orig_mod.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

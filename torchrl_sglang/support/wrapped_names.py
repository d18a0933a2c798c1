"""Names of tensors inside wrappers of single layers."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Name parts of torch.compile, activation checkpointing and FSDP."""


def without_wrappers(name: str) -> str:
    """Returns a tensor's name without the wrappers around its layers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

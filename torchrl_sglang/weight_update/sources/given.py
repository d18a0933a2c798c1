"""Unwraps what a caller gives as weights, once for an update.

Each question about it (which rank sends, is there an adapter, can it be called) is
answered from :class:`Given`, so that nothing else walks through wrappers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrl.modules.llm.policies import LLMWrapperBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Weights as the caller gave them, and the modules found in them."""

    weights: Any
    """What the caller gave: a module, a state dict, pairs, an exporter, a folder."""
    innermost: nn.Module | None
    """The module inside all wrappers; ``None`` if none was given."""
    peft_model: Any
    """The PEFT model that is, or is wrapped in, the module; or ``None``."""
    is_copy: bool
    """Whether this is another rank than 0 of DistributedDataParallel."""


def unwrap(weights: Any) -> Given:
    """Finds the modules in weights, from the outside in."""
    module, innermost, peft_model, is_copy = weights, None, None, False
    while isinstance(module, nn.Module):
        innermost = module
        if peft_model is None and _is_peft_model(module):
            peft_model = module
        if isinstance(module, DistributedDataParallel):
            is_copy = is_copy or dist.get_rank(module.process_group) != 0
        if isinstance(module, LLMWrapperBase):
            module = module.model
        else:
            # DDP, and torch.compile.
            module = getattr(module, "module", getattr(module, "_orig_mod", None))
    return Given(
        weights=weights, innermost=innermost, peft_model=peft_model, is_copy=is_copy
    )


def _is_peft_model(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and any(
        kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__
    )

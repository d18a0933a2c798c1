"""Experts that Hugging Face's routers choose: the oracle of routing."""

from __future__ import annotations

from typing import Any

import torch


def routers(model: Any) -> list[torch.nn.Module]:
    """The modules that return (logits, weights, experts), one for each layer."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]


@torch.no_grad()
def chosen(model: Any, token_ids: Any) -> torch.Tensor:
    """Returns the experts of each token, ``(tokens, layers, chosen)``, sorted."""
    found: list[torch.Tensor] = []
    hooks = [
        each.register_forward_hook(lambda module, inputs, out: found.append(out[2]))
        for each in routers(model)
    ]
    model(torch.as_tensor(token_ids)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values

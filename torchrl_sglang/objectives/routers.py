"""Routers of mixtures of experts: finds them in a model, and controls their choice.

A router's own forward runs. Only the result of its ``topk`` is replaced: the experts
are given, and their scores are gathered from the router's own, so that weights are
normalized and scaled as in the model, and have their gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrl_sglang.errors import ConfigurationError

_ROUTER = re.compile(r"(Router|Gate|Gating)$")
"""Names of router classes."""

_BLOCK = re.compile(r"(MoE|Moe)(Block|MLP|Mlp|Layer)?$")
"""Names of block classes that choose experts themselves, in models without routers."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
"""Number of a layer in a module's name."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_GROUPS = ("num_group", "n_group", "num_expert_group")


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """A router of a layer."""

    name: str
    module: nn.Module
    layer: int
    num_experts: int
    num_groups: int
    """Groups of experts, chosen first; 1: none."""


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Returns the routers of a model, also with PEFT or FSDP2, one for each layer."""
    modules = dict(model.named_modules())
    names_of_routers = _matching(modules, _ROUTER) or _matching(modules, _BLOCK)
    if not names_of_routers:
        raise ConfigurationError(
            f"{_own_name(model)} has no routers: no module whose class is named "
            f"...Router, ...Gate or ...MoE. Replay is for mixtures of experts; leave "
            f"it out, or name the classes like that."
        )
    routers = [_describe(name, modules[name], model) for name in names_of_routers]
    layers = [router.layer for router in routers]
    if len(set(layers)) < len(layers):
        layer = next(number for number in layers if layers.count(number) > 1)
        names = [router.name for router in routers if router.layer == layer]
        raise ConfigurationError(
            f"Layer {layer} of {_own_name(model)} has several routers, "
            f"{' and '.join(names)}, and servers report one; replay is not possible."
        )
    return tuple(sorted(routers, key=lambda router: router.layer))


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Returns a model's layers, and its number of chosen experts per token."""
    config: Any = getattr(model, "config", None)
    text: Any = None if config is None else config.get_text_config()
    for name in ("num_experts_per_tok", "moe_k", "top_k_experts"):
        chosen = getattr(text, name, None)
        if isinstance(chosen, int):
            return int(text.num_hidden_layers), chosen
    raise ConfigurationError(
        f"The configuration of {_own_name(model)} has no num_experts_per_tok, so that "
        f"its routers cannot be identified; replay is for mixtures of experts."
    )


def _matching(modules: dict[str, nn.Module], pattern: re.Pattern[str]) -> list[str]:
    return [
        name
        for name, module in modules.items()
        if pattern.search(_own_name(module)) and _LAYER.search(name)
    ]


def own_class(module: nn.Module) -> type:
    """Returns a module's class; FSDP2 derives a class from it."""
    kinds = type(module).__mro__
    named = (cls for cls in kinds if not cls.__module__.startswith("torch."))
    return next(named, kinds[0])


def _own_name(module: nn.Module) -> str:
    return own_class(module).__name__


def _describe(name: str, module: nn.Module, model: nn.Module) -> Router:
    match = _LAYER.search(name)
    assert match is not None
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    count = _first_int(_NUM_EXPERTS, module, text)
    if count is None:
        raise ConfigurationError(
            f"The router {name} has no num_experts, nor has the configuration of "
            f"{_own_name(model)}; replay is not possible."
        )
    return Router(
        name=name,
        module=module,
        layer=int(match[1]),
        num_experts=count,
        num_groups=_first_int(_NUM_GROUPS, module, text) or 1,
    )


def _first_int(names: tuple[str, ...], *places: Any) -> int | None:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if isinstance(value, int)), None)


class Choose(TorchFunctionMode):
    """Makes a router, whose forward runs under this mode, choose the given experts.

    ``experts`` is int64 ``(tokens, chosen)``; the router itself chooses for rows of -1.
    ``own`` is bool ``(tokens,)``, whether the router's own choice is the same set; None
    before its choice.
    """

    def __init__(self, router: Router, experts: Tensor) -> None:
        super().__init__()
        self._router, self._experts = router, experts
        self._missing = (experts < 0).any(-1, keepdim=True)
        self.own: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            chosen = kwargs.get("k", args[1] if len(args) > 1 else None)
            return self._topk(scores, chosen, result)
        return result

    def _topk(self, scores: Tensor, chosen: Any, result: Any) -> Any:
        router, count = self._router, self._experts.shape[-1]
        if router.num_groups > 1 and scores.shape == (
            len(self._experts),
            router.num_groups,
        ):
            return self._topk_groups(scores, chosen)
        if scores.shape[-1] != router.num_experts or chosen != count:
            return result
        shape = (*scores.shape[:-1], count)
        if scores.shape[:-1].numel() != len(self._experts):
            raise ConfigurationError(
                f"The router {router.name} sees {scores.shape[:-1].numel()} tokens, "
                f"and the model was given {len(self._experts)}; replay is for forward "
                f"passes over whole sequences, without a KV cache."
            )
        experts = self._experts.view(shape)
        is_same = (experts.sort(-1).values == result.indices.sort(-1).values).all(-1)
        self.own = is_same.view(-1) | self._missing.squeeze(-1)
        # In the router's order: the same experts are summed in the same order.
        unchanged = self.own.view(*shape[:-1], 1)
        indices = torch.where(unchanged, result.indices, experts)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _topk_groups(self, scores: Tensor, chosen: Any) -> Any:
        """Returns groups, the experts' groups first.

        Some models set the scores of other groups to zero, and weigh with them.
        """
        router = self._router
        groups = self._experts.clamp_min(0) // (router.num_experts // router.num_groups)
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, groups, True)
        needed &= ~self._missing
        indices = scores.masked_fill(needed, float("inf")).topk(chosen, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, indices), indices))

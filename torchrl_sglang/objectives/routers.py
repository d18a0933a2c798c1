"""Routers of mixtures of experts: finds them in a model, and makes them choose.

A router's own forward runs. Only what ``topk`` returns in it is replaced: the experts
are those that are given, and their scores are gathered from the router's own, so that
weights are normalised and scaled as the model does it, and have their gradient.
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
"""Names of classes that are routers."""

_BLOCK = re.compile(r"(MoE|Moe)(Block|MLP|Mlp|Layer)?$")
"""Names of classes that choose experts themselves, where a model has no routers."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
"""Number of a layer in a module's name."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_GROUPS = ("num_group", "n_group", "num_expert_group")

_SINKS = ("PhimoeTopKRouter",)
"""Routers that take one maximum after the other instead of ``topk``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """A router of one layer."""

    name: str
    """Name of the module in the model."""
    module: nn.Module
    """The module whose forward chooses."""
    layer: int
    """Number of its layer."""
    num_experts: int
    """Experts that it chooses from."""
    num_groups: int
    """Groups of experts that it chooses from before; 1: none."""
    in_turn: bool
    """Whether it chooses one expert after the other, by maxima."""


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Returns the routers of a model, by layer.

    Args:
        model: of transformers; one of PEFT or sharded by FSDP2 as well.

    Raises:
        ConfigurationError: if there are none, or two in one layer.
    """
    modules = dict(model.named_modules())
    found = _matching(modules, _ROUTER) or _matching(modules, _BLOCK)
    if not found:
        raise ConfigurationError(
            f"{_own_name(model)} has no routers: no module whose class is named "
            f"...Router, ...Gate or ...MoE. Replay is for mixtures of experts; leave "
            f"it out, or name the classes like that."
        )
    routers = [_describe(name, modules[name], model) for name in found]
    layers = [each.layer for each in routers]
    if len(set(layers)) < len(layers):
        twice = next(each for each in layers if layers.count(each) > 1)
        names = [each.name for each in routers if each.layer == twice]
        raise ConfigurationError(
            f"Layer {twice} of {_own_name(model)} has several routers, "
            f"{' and '.join(names)}, and servers report one; replay is not possible."
        )
    return tuple(sorted(routers, key=lambda each: each.layer))


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Returns the layers of a model, and the experts that routers choose for a token.

    Raises:
        ConfigurationError: if its configuration does not tell.
    """
    config: Any = getattr(model, "config", None)
    text: Any = None if config is None else config.get_text_config()
    for name in ("num_experts_per_tok", "moe_k", "top_k_experts"):
        chosen = getattr(text, name, None)
        if isinstance(chosen, int):
            return int(text.num_hidden_layers), chosen
    raise ConfigurationError(
        f"The configuration of {_own_name(model)} has no num_experts_per_tok, so that "
        f"its routers cannot be told apart; replay is for mixtures of experts."
    )


def _matching(modules: dict[str, nn.Module], pattern: re.Pattern[str]) -> list[str]:
    return [
        name
        for name, module in modules.items()
        if pattern.search(_own_name(module)) and _LAYER.search(name)
    ]


def _own_name(module: nn.Module) -> str:
    """Returns the name of a module's class, of which FSDP2 makes one of its own."""
    kinds = [
        each
        for each in type(module).__mro__
        if not each.__module__.startswith("torch.")
    ]
    return (kinds or [type(module)])[0].__name__


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
        in_turn=_own_name(module) in _SINKS,
    )


def _first_int(names: tuple[str, ...], *places: Any) -> int | None:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((each for each in values if isinstance(each, int)), None)


class Choose(TorchFunctionMode):
    """Makes a router choose experts that are given, where it chooses.

    Args:
        router: whose forward runs under this mode.
        experts: int64 ``(tokens, chosen)``; a row of -1 is left to the router.

    Attributes:
        own (Tensor): bool ``(tokens,)``, whether the router alone had chosen the same
            set; None until it has chosen.
    """

    def __init__(self, router: Router, experts: Tensor) -> None:
        super().__init__()
        self._router, self._experts = router, experts
        self._missing = (experts < 0).any(-1, keepdim=True)
        self._turns: list[Tensor] = []
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
        if func in (torch.max, torch.Tensor.max) and self._router.in_turn:
            return self._max(args[0], kwargs, result)
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
        wanted = self._experts.view(shape)
        same = (wanted.sort(-1).values == result.indices.sort(-1).values).all(-1)
        self.own = same.view(-1) | self._missing.squeeze(-1)
        # In its own order, so that the same experts are added up the same way.
        kept = self.own.view(*shape[:-1], 1)
        indices = torch.where(kept, result.indices, wanted)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _topk_groups(self, scores: Tensor, chosen: Any) -> Any:
        """Returns groups, first those of the experts.

        Some models set the scores of other groups to zero, and weigh with them.
        """
        router = self._router
        groups = self._experts.clamp_min(0) // (router.num_experts // router.num_groups)
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, groups, True)
        needed &= ~self._missing
        indices = scores.masked_fill(needed, float("inf")).topk(chosen, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _max(self, scores: Tensor, kwargs: Any, result: Any) -> Any:
        """Returns the score of the expert whose turn it is."""
        if not kwargs.get("keepdim") or len(self._turns) == self._experts.shape[-1]:
            return result
        wanted = self._experts[:, len(self._turns), None]
        indices = torch.where(self._missing, result.indices, wanted)
        self._turns.append(result.indices)
        if len(self._turns) == self._experts.shape[-1]:
            chosen = torch.cat(self._turns, -1).sort(-1).values
            same = (chosen == self._experts.sort(-1).values).all(-1)
            self.own = same | self._missing.squeeze(-1)
        return torch.return_types.max((scores.gather(-1, indices), indices))

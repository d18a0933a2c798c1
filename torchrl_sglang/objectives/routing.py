"""Replay of routing: the trainer's experts of each token are the engine's.

An engine and a trainer compute the scores of a router with different kernels, and often
in different types, so that they choose different experts for some tokens, whose
log-probs then differ by far more than rounding. Here the trainer takes the engine's
choice, from a batch collected with ``token_columns=["routed_experts"]``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import rows_of
from torchrl_sglang.objectives.routers import Choose, Router, find_routers, sizes_of
from torchrl_sglang.requests.token_columns import ATTENTION_MASK, ROUTED_EXPERTS, TOKENS

EXPERTS = (ROUTED_EXPERTS, "full")
"""Key of the experts of each token in a batch."""

_CHECKPOINTED = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of transformers' and PyTorch's modules for activation checkpointing."""

_REPLAYS: weakref.WeakKeyDictionary[nn.Module, RoutingReplay] = (
    weakref.WeakKeyDictionary()
)
"""Model -> its replay."""


@dataclass(kw_only=True, eq=False)
class _Pass:
    """The experts of a forward pass, and of its repetition in the backward pass."""

    experts: Tensor
    """``(tokens, layers, chosen)``, for the tokens of ``ids``."""
    ids: Tensor | None
    """Tokens of the experts; None: the input's positions."""
    placed: Tensor | None = None
    """Experts of each position of the input, -1 for padding."""
    counted: set[int] = field(default_factory=set)
    """Layers whose choice was counted."""


class RoutingReplay:
    """Makes the routers of a model choose given experts; see :func:`replay_routing`."""

    def __init__(self, model: nn.Module) -> None:
        self.routers: tuple[Router, ...] = find_routers(model)
        """The routers of the model."""
        self._num_layers, self._num_chosen = sizes_of(model)
        self._model = model
        self._pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)
        self._stack = ExitStack()
        self._passes, self._replayed = 0, 0
        self.reset()

    def reset(self) -> None:
        """Resets the counts."""
        self._differing: Tensor | float = 0.0
        self._chosen: Tensor | float = 0.0

    @property
    def flipped(self) -> float:
        """Share of choices in which the model alone would differ.

        Over all tokens and layers of forward passes since :meth:`reset`; reading it
        waits for the device.
        """
        differing, chosen = self.counts
        return differing / max(chosen, 1.0)

    @property
    def counts(self) -> tuple[float, float]:
        """Number of differing choices, and of all, as for :attr:`flipped`."""
        return float(self._differing), float(self._chosen)

    @property
    def experts(self) -> Tensor | None:
        """Experts ``(tokens, layers, chosen)`` of the current batch, without padding.

        None outside of :meth:`using` with a batch.
        """
        routed = self._pass.get()
        return None if routed is None or routed.ids is None else routed.experts

    @contextmanager
    def using(
        self, experts: TensorDictBase | Tensor, key: NestedKey = EXPERTS
    ) -> Iterator[None]:
        """Replays in forward passes in its block, and in their backward passes.

        Args:
            experts: a batch with ``("routed_experts", "full")`` and the model's input
                tokens, padded or packed, in the order of the batch; or integers
                ``(*input_ids.shape, layers, chosen)``. Where they are -1, the router
                chooses.
            key: key of the experts in a batch.

        Raises:
            ConfigurationError: if the batch has none, or for another number of layers.
        """
        if isinstance(experts, Tensor):
            routed = _Pass(experts=experts, ids=None)
        else:
            routed = _read(experts, key)
        self._check(routed.experts)
        with self._set(routed):
            yield

    @contextmanager
    def _set(self, value: _Pass | None) -> Iterator[None]:
        token = self._pass.set(value)
        try:
            yield
        finally:
            self._pass.reset(token)

    def _check(self, experts: Tensor) -> None:
        sizes = self._num_layers, self._num_chosen
        if experts.dtype.is_floating_point or tuple(experts.shape[-2:]) != sizes:
            raise ConfigurationError(
                f"The experts are {experts.dtype} of shape {tuple(experts.shape)}, and "
                f"the model has {sizes[0]} layers and chooses {sizes[1]} experts: "
                f"give integers (..., {sizes[0]}, {sizes[1]}). Do the servers serve "
                f"this model?"
            )
        num_experts = min(router.num_experts for router in self.routers)
        if experts.numel() and int(experts.max()) >= num_experts:
            raise ConfigurationError(
                f"A token has the expert {int(experts.max())}, and the model has "
                f"{num_experts}, from 0 on. Do the servers serve this model?"
            )

    def _place(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Assigns experts to each position of the input."""
        routed = self._pass.get()
        self._passes += 1
        if routed is None:
            return
        self._replayed += 1
        # Checkpointing may have been enabled since the last pass.
        self._bind_checkpoints()
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor):
            raise ConfigurationError(
                "The model was called without input_ids, which the experts belong to; "
                "replay needs token ids."
            )
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        experts = routed.experts.to(ids.device)
        if routed.ids is None:
            if experts.shape[:-2] != ids.shape:
                raise ConfigurationError(
                    f"The experts are of shape {tuple(experts.shape)}, and input_ids "
                    f"of {tuple(ids.shape)}: give them for each token of input_ids."
                )
            routed.placed = experts.flatten(0, -3)
        else:
            routed.placed = _align(experts, routed.ids.to(ids.device), ids, mask)

    def _route(self, router: Router) -> Any:
        """Returns a forward of a router that chooses the experts of the pass."""
        original = router.module.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            routed = self._pass.get()
            if routed is None or routed.placed is None:
                return original(*args, **kwargs)
            with Choose(router, routed.placed[:, router.layer].long()) as mode:
                output = original(*args, **kwargs)
            if mode.own is None:
                raise ConfigurationError(
                    f"The router {router.name} chose no {self._num_chosen} of "
                    f"{router.num_experts} experts by topk, so that its choice cannot "
                    f"be replaced; replay is not possible for this model."
                )
            if router.layer not in routed.counted:
                routed.counted.add(router.layer)
                real = routed.placed[:, router.layer, 0] >= 0
                self._differing = self._differing + (~mode.own).sum()
                self._chosen = self._chosen + real.sum()
            return output

        return forward

    def _bind(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a checkpoint function whose recomputation replays the same pass."""

        @wraps(checkpoint)
        def bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            routed = self._pass.get()

            def run(*inputs: Any, **options: Any) -> Any:
                # A backward pass may come after the block.
                with ExitStack() as stack, self._set(routed):
                    if routed is not None and _REPLAYS.get(self._model) is not self:
                        self._bind_routers(stack)
                    return function(*inputs, **options)

            return checkpoint(run, *args, **kwargs)

        bound.__replay__ = self  # type: ignore[attr-defined]
        return bound

    def _bind_checkpoints(self) -> None:
        for module in self._model.modules():
            for name in _CHECKPOINTED:
                function = vars(module).get(name)
                is_bound = getattr(function, "__replay__", None) is self
                if callable(function) and not is_bound:
                    set_attribute(self._stack, module, name, self._bind(function))

    def _bind_routers(self, stack: ExitStack) -> None:
        for router in self.routers:
            set_attribute(stack, router.module, "forward", self._route(router))

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self._model in _REPLAYS:
            raise ConfigurationError("Routing of this model is replayed already.")
        with self._stack as stack:
            _REPLAYS[self._model] = self
            stack.callback(_REPLAYS.pop, self._model, None)
            hook = self._model.register_forward_pre_hook(self._place, with_kwargs=True)
            stack.callback(hook.remove)
            self._bind_routers(stack)
            self._bind_checkpoints()
            yield
        if self._passes and not self._replayed:
            warnings.warn(
                f"{self._passes} passes of the model were inside of replay_routing, "
                f"and none replayed experts. Give it the TransformersWrapper that the "
                f"loss has, or use replay.using(batch).",
                RuntimeWarning,
                stacklevel=5,
            )


@contextmanager
def replay_routing(model: Any) -> Iterator[RoutingReplay]:
    """Makes a model use the engine's experts for a batch's tokens.

    A mixture of experts chooses some experts for each token and layer. Engine and
    trainer, with different kernels, sometimes choose differently, and such a token's
    log-prob is of another function than at sampling. Here, routers choose the engine's
    reported experts. The weights of the experts come from the router's own scores: it
    is trained as usual.

    Inside the block, the model replays given experts: from
    :meth:`~RoutingReplay.using`, from a wrapper given here instead of its model, and
    from the losses of this package; otherwise, its routers choose. A backward pass with
    gradient checkpointing replays its forward pass's experts, also after the block.

    Experts come from ``token_columns=["routed_experts"]``; the router chooses for
    unreported tokens, such as the last.

    Args:
        model: a model of transformers, also with PEFT or FSDP2, or the
            ``TransformersWrapper`` around it.

    Yields:
        RoutingReplay: the replay, which counts differing choices.

    Raises:
        ConfigurationError: if the model's routers are not found.

    Examples:
        >>> with replay_routing(model) as replay:  # doctest: +SKIP
        ...     with replay.using(batch["routed_experts", "full"]):
        ...         logits = model(batch["tokens", "full"]).logits
        >>> replay.flipped  # doctest: +SKIP
        0.013
    """
    actor = model if isinstance(model, TransformersWrapper) else None
    model = model if actor is None else actor.model
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"replay_routing needs a model of transformers or TorchRL's "
            f"TransformersWrapper, got {type(model).__name__}."
        )
    replay = RoutingReplay(model)
    with ExitStack() as stack:
        stack.enter_context(replay._active())
        if actor is not None:
            set_attribute(stack, actor, "forward", _reading(replay, actor.forward))
        yield replay


def replaying(actor: Any, batch: TensorDictBase) -> AbstractContextManager[None]:
    """Replays a batch's experts, if an actor's or model's routing is replayed."""
    replay = replay_of(actor)
    return nullcontext() if replay is None else replay.using(batch)


def replay_of(actor: Any) -> RoutingReplay | None:
    """Returns the replay of an actor, a wrapper or a model; None if there is none."""
    model = actor.model if isinstance(actor, TransformersWrapper) else actor
    return _REPLAYS.get(model) if isinstance(model, nn.Module) else None


def _reading(replay: RoutingReplay, forward: Callable[..., Any]) -> Any:
    @wraps(forward)
    def read(tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        with replay.using(tensordict):
            return forward(tensordict, *args, **kwargs)

    return read


def set_attribute(stack: ExitStack, place: Any, name: str, value: Any) -> None:
    """Sets an attribute of an object until the stack ends."""
    attributes = vars(place)
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = value


def _read(batch: TensorDictBase, key: NestedKey) -> _Pass:
    """Returns the experts of a batch's tokens, and these tokens."""
    experts = rows_of(batch, key)
    if experts is None:
        rows = batch.unbind(0) if batch.batch_dims else (batch,)
        lacking = sum(row.get(key, None) is None for row in rows)
        who = f"{lacking} of {len(rows)} rows have"
        raise ConfigurationError(
            f"{who if lacking < len(rows) else 'The batch has'} no {key!r}, which "
            f"routing is replayed from; collect it "
            f"with token_columns=['routed_experts'] of the wrapper or the gateway, and "
            f"start the servers with enable_return_routed_experts=True."
        )
    tokens, masks = rows_of(batch, TOKENS), rows_of(batch, ATTENTION_MASK)
    if tokens is None:
        raise ConfigurationError(f"The batch has no {TOKENS!r}, which experts are of.")
    masks = [torch.ones_like(ids) for ids in tokens] if masks is None else masks
    rows = list(zip(experts, tokens, masks, strict=True))
    for row, ids, _ in rows:
        if len(row) != len(ids):
            raise ConfigurationError(
                f"{key!r} has the experts of {len(row)} tokens for a sequence of "
                f"{len(ids)}; they must be of the same tokens."
            )
    return _Pass(
        experts=torch.cat([row[mask.bool()] for row, _, mask in rows]),
        ids=torch.cat([ids[mask.bool()] for _, ids, mask in rows]),
    )


def _align(experts: Tensor, tokens: Tensor, ids: Tensor, mask: Any) -> Tensor:
    """Returns the experts of each input position, -1 outside of the batch's tokens."""
    where = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        where = mask.bool()
    given_ids = ids[where]
    if given_ids.shape != tokens.shape or not torch.equal(given_ids, tokens):
        raise ConfigurationError(
            f"The model was given {len(given_ids)} tokens, which are not the "
            f"{len(tokens)} of the batch in their order, so that their experts are not "
            f"known; give the model the tokens of the batch."
        )
    placed = experts.new_full((ids.numel(), *experts.shape[1:]), -1)
    placed[where.flatten()] = experts
    return placed

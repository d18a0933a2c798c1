"""Log-probs of padded logits, over the sampling supports of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import read
from torchrl_sglang.objectives.packing import PassTerms
from torchrl_sglang.objectives.routing import set_attribute
from torchrl_sglang.objectives.support import (
    ACTORS,
    Drawn,
    read_sampling,
    replays_sampling,
)
from torchrl_sglang.objectives.token_terms import check_ids, pieces, token_terms
from torchrl_sglang.requests.token_columns import ATTENTION_MASK, TOKENS

_DRAWN: ContextVar[Drawn | None] = ContextVar("drawn", default=None)
"""Sampling distributions of the actor's current batch."""


def padded_terms(
    actor: TransformersWrapper,
    tokens: Tensor,
    real: Tensor,
    mask: Tensor,
    *,
    entropy: bool = False,
    sampling: Drawn | None = None,
    ids: Tensor | None = None,
) -> PassTerms:
    """Runs an actor's model on left-padded sequences, as :func:`.packed_terms`."""
    _, logits = actor._model_forward_with_padded_sequences(
        tokens,
        real,
        pad_val=actor.tokenizer.pad_token_id,
        logits_only=True,
        **actor.generate_kwargs,
    )
    # After the forward pass, a collective: an earlier error hangs other ranks.
    drawn = None if sampling is None else sampling.of(mask, tokens)
    log_probs, entropies, of_ids = token_terms(
        logits.flatten(0, 1),
        tokens.flatten(),
        entropy=entropy,
        sampling=None if drawn is None else drawn.place(mask),
        ids=None if ids is None else ids.flatten(0, 1),
    )
    return PassTerms(
        mask=mask,
        log_prob=torch.where(mask, log_probs.view_as(mask), 0),
        entropy=torch.where(mask, entropies.view_as(mask), 0),
        id_log_probs=of_ids.view(*mask.shape, -1).where(mask.unsqueeze(-1), 0),
    )


class _Restrict(torch.autograd.Function):
    """Writes logits of the sampler's distributions over a model's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, sampling: Drawn) -> Tensor:
        ctx.tokens, ctx.sampling = tokens, sampling
        ctx.mark_dirty(logits)
        _restrict(logits, tokens, sampling, -inf)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        _restrict(gradient, ctx.tokens, ctx.sampling, 0.0)
        return gradient, None, None


def _restrict(values: Tensor, tokens: Tensor, sampling: Drawn, rest: float) -> None:
    """Divides values by temperatures, and overwrites values outside of the supports."""
    flat = values.view(-1, values.shape[-1])
    for piece in pieces(flat.shape[-1], tokens, sampling):
        values_of_piece, rows = piece.read(flat, flat.dtype), piece.rows
        if piece.ids is None:
            flat[rows] = values_of_piece.to(flat.dtype)
            continue
        assert isinstance(rows, Tensor)
        assert piece.real is not None
        flat.index_fill_(0, rows, rest)
        owners = rows.unsqueeze(-1).expand_as(piece.ids)
        flat[owners[piece.real], piece.ids[piece.real]] = values_of_piece[
            piece.real
        ].to(flat.dtype)


@contextmanager
def replay_sampling(actor: TransformersWrapper) -> Iterator[TransformersWrapper]:
    """Makes an actor's distributions equal the sampling distributions of a batch.

    It is for TorchRL's losses, and for :class:`.OffPolicyCorrection` with an actor; the
    losses of this package do not need it. A reference's actor, in its own block, gives
    ``RetrieveLogProb`` log-probs of the same distributions.

    Inside the block, log-probs, logits and distributions of the actor have a token's
    logits divided by its temperature, and -inf for tokens excluded by top-k, top-p and
    min-p, if the batch has ``"sampling_support"`` and ``"sampling_temperature"``, as
    from ``logprobs_mode="behaviour"``. Other batches are computed as usual. The logits
    are changed in place, in their own type.

    Args:
        actor: an actor of tokens: ``input_mode="tokens"``, ``generate=False`` and
            ``pad_model_input=True``.

    Yields:
        TransformersWrapper: the actor.

    Raises:
        ConfigurationError: if it is another actor, or a token is not in its support.

    Examples:
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.objectives.llm import GRPOLoss
        >>> actor = TransformersWrapper(
        ...     model, tokenizer=tokenizer, input_mode="tokens", generate=False
        ... )
        >>> with replay_sampling(actor):  # doctest: +SKIP
        ...     GRPOLoss(actor)(batch).loss_objective.backward()
    """
    _check_actor(actor)
    forward, compute = actor.forward, actor._compute_log_probs_from_model_output

    def read_and_forward(tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        token = _DRAWN.set(_of_batch(tensordict))
        try:
            return forward(tensordict, *args, **kwargs)
        finally:
            _DRAWN.reset(token)

    def restrict_and_compute(
        output: Any, input_ids: Tensor, *args: Any, **kw: Any
    ) -> Any:
        drawn = _DRAWN.get()
        if drawn is not None:
            output = {"logits": _before(output["logits"], input_ids, drawn)}
        return compute(output, input_ids, *args, **kw)

    with ExitStack() as stack:
        set_attribute(stack, actor, "forward", read_and_forward)
        name = "_compute_log_probs_from_model_output"
        set_attribute(stack, actor, name, restrict_and_compute)
        ACTORS.add(actor)
        stack.callback(ACTORS.discard, actor)
        yield actor


def _check_actor(actor: Any) -> None:
    if not isinstance(actor, TransformersWrapper) or actor.generate:
        raise ConfigurationError(
            f"replay_sampling needs TorchRL's TransformersWrapper with generate=False, "
            f"got {type(actor).__name__}."
        )
    if actor.input_mode != "tokens":
        raise ConfigurationError(
            f"replay_sampling needs an actor with input_mode='tokens', which reads the "
            f"tokens that were drawn, got {actor.input_mode!r}."
        )
    if not actor.pad_model_input:
        raise ConfigurationError(
            "replay_sampling needs an actor with pad_model_input=True: without, tokens "
            "see those that follow them in TorchRL 0.14, and log-probs are wrong by "
            "themselves."
        )
    if replays_sampling(actor):
        raise ConfigurationError(
            "This actor replays sampling already: replay_sampling is inside of "
            "another block of it."
        )


def _of_batch(batch: TensorDictBase) -> Drawn | None:
    """Returns the sampling distributions of tokens, at all positions."""
    sampling = read_sampling(batch)
    if sampling is None:
        return None
    tokens = read(batch, TOKENS, padding_value=0)
    mask = read(batch, ATTENTION_MASK, padding_value=False)
    assert tokens is not None
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    # The first token of a sequence has no context.
    scored = real & (real.cumsum(-1) > 1)
    drawn = sampling.of(scored, tokens)
    return None if drawn is None else drawn.place(scored)


def _before(logits: Tensor, input_ids: Tensor, sampling: Drawn) -> Tensor:
    """Restricts a model's logits, which predict the next token."""
    check_ids(sampling.ids, logits.shape[-1])
    following = Drawn(
        temperatures=sampling.temperatures.view_as(input_ids).roll(-1, 1).flatten(),
        counts=sampling.counts.view_as(input_ids).roll(-1, 1).flatten(),
        ids=sampling.ids,
    )
    tokens = input_ids.roll(-1, 1).flatten()
    restricted: Tensor = _Restrict.apply(  # type: ignore[no-untyped-call]
        logits.contiguous(), tokens, following
    )
    return restricted

"""Log-probs of padded logits, over the supports that tokens were drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import ATTENTION_MASK, TOKENS, read
from torchrl_sglang.objectives.packing import PackedTokens
from torchrl_sglang.objectives.support import (
    ACTORS,
    Drawn,
    read_sampling,
    replays_sampling,
)
from torchrl_sglang.objectives.token_terms import check_ids, pieces, token_terms

_DRAWN: ContextVar[Drawn | None] = ContextVar("drawn", default=None)
"""What the tokens of the batch that an actor is given were drawn from."""


def padded_terms(
    actor: TransformersWrapper,
    tokens: Tensor,
    real: Tensor,
    mask: Tensor,
    *,
    entropy: bool = False,
    sampling: Drawn | None = None,
) -> PackedTokens:
    """Runs an actor's model on padded sequences, as :func:`.packed_terms` on a row.

    Log-probs are computed in float32 whatever the type of the logits, in the memory of
    the logits.

    Args:
        actor: scores tokens.
        tokens: ``(sequences, longest)``, padded on the left.
        real: which of them are tokens, likewise.
        mask: which of these are wanted, likewise.
        entropy: whether entropies are.
        sampling: what all tokens were drawn from, likewise. Defaults to None: the whole
            vocabulary at temperature 1.

    Raises:
        ConfigurationError: if a wanted token is not in its support.
    """
    _, logits = actor._model_forward_with_padded_sequences(
        tokens,
        real,
        pad_val=actor.tokenizer.pad_token_id,
        logits_only=True,
        **actor.generate_kwargs,
    )
    # After the pass, which other ranks take part in: they are told of an error then.
    drawn = None if sampling is None else sampling.of(mask, tokens)
    log_probs, entropies = token_terms(
        logits.flatten(0, 1),
        tokens.flatten(),
        entropy=entropy,
        sampling=None if drawn is None else drawn.place(mask),
    )
    return PackedTokens(
        mask=mask,
        log_prob=torch.where(mask, log_probs.view_as(mask), 0),
        entropy=torch.where(mask, entropies.view_as(mask), 0),
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
    """Divides values by temperatures, and sets those outside of the supports."""
    flat = values.view(-1, values.shape[-1])
    for piece in pieces(flat.shape[-1], tokens, sampling):
        found, rows = piece.read(flat, flat.dtype), piece.rows
        if piece.ids is None:
            flat[rows] = found.to(flat.dtype)
            continue
        assert isinstance(rows, Tensor)
        assert piece.real is not None
        flat.index_fill_(0, rows, rest)
        owners = rows.unsqueeze(-1).expand_as(piece.ids)
        flat[owners[piece.real], piece.ids[piece.real]] = found[piece.real].to(
            flat.dtype
        )


@contextmanager
def replay_sampling(actor: TransformersWrapper) -> Iterator[TransformersWrapper]:
    """Makes an actor's distributions those that the tokens of a batch were drawn from.

    It is for TorchRL's losses, and for :class:`.OffPolicyCorrection` with an actor; the
    losses of this package need no help. A reference's actor, in a block of its own,
    gives ``RetrieveLogProb`` log-probs of the same distributions.

    Inside the block, log-probs, logits and distributions of the actor have a token's
    logits divided by its temperature, and -inf for tokens that top-k, top-p and min-p
    left out, where the batch has ``"sampling_support"`` and ``"sampling_temperature"``,
    as those of ``logprobs_mode="behaviour"`` have. A batch without these is computed as
    ever. The logits are changed in place, in their own type.

    Args:
        actor: scores tokens: ``input_mode="tokens"``, ``generate=False`` and
            ``pad_model_input=True``.

    Yields:
        TransformersWrapper: the actor.

    Raises:
        ConfigurationError: if it is no such actor, or a token is not in its support.

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
        found = _DRAWN.get()
        if found is not None:
            output = {"logits": _before(output["logits"], input_ids, found)}
        return compute(output, input_ids, *args, **kw)

    own, names = vars(actor), ("forward", "_compute_log_probs_from_model_output")
    # Of a replay of routing, for instance.
    before = {name: own[name] for name in names if name in own}
    own |= dict(zip(names, (read_and_forward, restrict_and_compute), strict=True))
    ACTORS.add(actor)
    try:
        yield actor
    finally:
        ACTORS.discard(actor)
        for name in names:
            del own[name]
        own |= before


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
    """Returns what tokens were drawn from, at all places."""
    sampling = read_sampling(batch)
    if sampling is None:
        return None
    tokens = read(batch, TOKENS, padding_value=0)
    mask = read(batch, ATTENTION_MASK, padding_value=False)
    assert tokens is not None
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    # Nothing is before the first token of a sequence.
    wanted = real & (real.cumsum(-1) > 1)
    found = sampling.of(wanted, tokens)
    return None if found is None else found.place(wanted)


def _before(logits: Tensor, input_ids: Tensor, sampling: Drawn) -> Tensor:
    """Restricts a model's logits, which are each of the next token."""
    check_ids(sampling.ids, logits.shape[-1])
    following = Drawn(
        temperatures=sampling.temperatures.view_as(input_ids).roll(-1, 1).flatten(),
        counts=sampling.counts.view_as(input_ids).roll(-1, 1).flatten(),
        ids=sampling.ids,
    )
    tokens = input_ids.roll(-1, 1).flatten()
    found: Tensor = _Restrict.apply(  # type: ignore[no-untyped-call]
        logits.contiguous(), tokens, following
    )
    return found

"""Replay of sampling: the trainer's distribution of each token is the sampler's.

``logprobs_mode="behaviour"`` records the temperature of each token and its support, the
tokens left by top-k, top-p and min-p. Log-probs of the trainer are comparable with the
recorded log-probs at the same temperature and support.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import read, rows_of
from torchrl_sglang.requests.token_columns import SAMPLING_SUPPORT, TOKENS

SUPPORT = (SAMPLING_SUPPORT, "full")
"""Key of the concatenated support ids of the tokens."""

COUNTS = (SAMPLING_SUPPORT, "full_counts")
"""Key of the size of each token's support; 0: the whole vocabulary."""

TEMPERATURES = ("sampling_temperature", "full")
"""Key of the temperature of each token."""

SAMPLING_KEYS = (SAMPLING_SUPPORT, TEMPERATURES[0])
"""Columns of a batch with the sampling distributions of its tokens."""

ACTORS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Actors with the sampler's distributions."""

_told: set[str] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The sampling distributions of tokens."""

    temperatures: Tensor
    counts: Tensor
    """Size of each token's support, of the same shape; 0: the whole vocabulary."""
    ids: Tensor
    """The concatenated supports of the tokens."""

    def of(self, wanted: Tensor, tokens: Tensor) -> Drawn | None:
        """Returns distributions of ``wanted`` tokens; None if they are the model's."""
        for key, values in ((TEMPERATURES, self.temperatures), (COUNTS, self.counts)):
            if values.shape != wanted.shape:
                raise ConfigurationError(
                    f"{key!r} has the shape {tuple(values.shape)}, and the tokens have "
                    f"{tuple(wanted.shape)}: they are not of the same tokens."
                )
        temperatures, counts = self.temperatures[wanted], self.counts[wanted]
        if _are_neutral(temperatures, counts):
            return None
        selected = wanted.flatten().repeat_interleave(self.counts.flatten())
        drawn = Drawn(temperatures=temperatures, counts=counts, ids=self.ids[selected])
        drawn._check(tokens[wanted])
        return drawn

    def place(self, wanted: Tensor) -> Drawn:
        """Scatters the distributions of masked tokens to all positions, flat."""
        places = wanted.flatten()
        temperatures = self.temperatures.new_ones(places.shape)
        counts = self.counts.new_zeros(places.shape)
        return Drawn(
            temperatures=temperatures.masked_scatter_(places, self.temperatures),
            counts=counts.masked_scatter_(places, self.counts),
            ids=self.ids,
        )

    def _check(self, tokens: Tensor) -> None:
        """Refuses tokens that are not, exactly once, in their support."""
        drawn = tokens.repeat_interleave(self.counts) == self.ids
        owner = torch.arange(len(tokens), device=tokens.device)
        owner = owner.repeat_interleave(self.counts)
        times = torch.zeros_like(self.counts).index_add_(
            0, owner, drawn.to(self.counts.dtype)
        )
        wrong = (self.counts > 0) & (times != 1)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ConfigurationError(
                f"The token {int(tokens[place])} is {int(times[place])} times among "
                f"the {int(self.counts[place])} that it was drawn from, by "
                f"{SUPPORT!r}, and must be there once: were the tokens changed after "
                f"they were generated? Leave such responses out, or give "
                f"replay_sampling=False."
            )
        if (self.temperatures <= 0).any():
            raise ConfigurationError(
                f"A temperature in {TEMPERATURES!r} is "
                f"{float(self.temperatures.min())}; it must be above 0. A greedy token "
                f"has 1 and a support of its own."
            )


def read_sampling(batch: TensorDictBase) -> Drawn | None:
    """Returns the distributions of a batch's tokens ``(B, T)``; None if neutral."""
    batch = _completed(batch)
    temperatures = read(batch, TEMPERATURES, padding_value=1.0)
    counts = read(batch, COUNTS, padding_value=0)
    if temperatures is None or counts is None or _are_neutral(temperatures, counts):
        return None
    rows = rows_of(batch, SUPPORT)
    if rows is None:
        raise ConfigurationError(
            f"The batch has {COUNTS!r} and no {SUPPORT!r}, the ids that these count."
        )
    sizes = counts.sum(-1).tolist()
    supports = [_trim(row, size) for row, size in zip(rows, sizes, strict=True)]
    return Drawn(
        temperatures=temperatures, counts=counts.long(), ids=torch.cat(supports).long()
    )


def _completed(batch: TensorDictBase) -> TensorDictBase:
    """Adds neutral distributions to rows without them.

    Rows of other modes among rows of ``"behaviour"`` have log-probs of the whole
    vocabulary at temperature 1.
    """
    if not isinstance(batch, LazyStackedTensorDict) or batch.batch_dims != 1:
        return batch
    keys = (TEMPERATURES, COUNTS, SUPPORT)
    rows = batch.tensordicts
    have = [all(row.get(key, None) is not None for key in keys) for row in rows]
    if all(have) or not any(have):
        return batch
    rows = [row if has else _neutral(row) for row, has in zip(rows, have, strict=True)]
    return LazyStackedTensorDict(*rows)


def _neutral(row: TensorDictBase) -> TensorDictBase:
    """Returns a row whose tokens were drawn from the model's own distribution."""
    tokens = row[TOKENS]
    neutral = row.exclude(*SAMPLING_KEYS)
    neutral[TEMPERATURES] = torch.ones_like(tokens, dtype=torch.float32)
    neutral[COUNTS] = torch.zeros_like(tokens, dtype=torch.int64)
    neutral[SUPPORT] = tokens.new_zeros(0)
    return neutral


def _are_neutral(temperatures: Tensor, counts: Tensor) -> bool:
    return not bool((temperatures != 1).any() | (counts > 0).any())


def _trim(row: Tensor, size: int) -> Tensor:
    """Returns the ids of a row without padding."""
    ids = row if len(row) == size else row[row >= 0]
    if len(ids) != size:
        raise ConfigurationError(
            f"{SUPPORT!r} has {len(ids)} ids in a row whose {COUNTS!r} are {size} in "
            f"all; pad it with -1, or not at all."
        )
    return ids


def replays_sampling(actor: Any) -> bool:
    """Returns whether an actor's distributions are the sampler's."""
    return actor in ACTORS


def warn_of_sampling(batch: TensorDictBase) -> None:
    """Warns once in a process of a batch whose sampling a loss does not replay."""
    if _told:
        return
    batch = _completed(batch)
    temperatures, counts = rows_of(batch, TEMPERATURES), rows_of(batch, COUNTS)
    modified = {
        "a temperature": _any(temperatures, lambda row: row != 1),
        "top-k, top-p or min-p": _any(counts, lambda row: row > 0),
    }
    named = " and ".join(name for name, holds in modified.items() if holds)
    if named:
        _told.add(named)
        warnings.warn(
            f"Tokens of this batch were drawn with {named}, and the loss computes the "
            f"log-probs of the whole vocabulary at temperature 1: the ratio of the "
            f"first step is not 1. Take CorrectedGRPOLoss(replay_sampling=True), or "
            f"with a loss of TorchRL replay_sampling(actor), and generate with "
            f"logprobs_mode='behaviour'.",
            RuntimeWarning,
            stacklevel=3,
        )


def _any(rows: Iterable[Tensor] | None, holds: Callable[[Tensor], Tensor]) -> bool:
    return rows is not None and any(bool(holds(row).any()) for row in rows)

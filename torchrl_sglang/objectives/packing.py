"""Runs a model on sequences that follow one another in one row, without padding."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.attention import PACKED, no_mask
from torchrl_sglang.objectives.support import Drawn
from torchrl_sglang.objectives.token_terms import token_terms

Packing = bool | Literal["auto"]

_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that begin again where attention and positions do."""

_ROPES = {"dynamic", "longrope"}
"""Positions that depend on the length of the whole row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """What a loss reads of a pass; all of it is ``(sequences, longest)``."""

    mask: Tensor
    """Tokens of the loss."""
    log_prob: Tensor
    """Their log-probs; 0 elsewhere, and where nothing is before a token."""
    entropy: Tensor
    """Of their distributions; 0 elsewhere."""


def why_padded(model: Any) -> str:
    """Says why a model cannot read several sequences in one row; "" if it can. Pure.

    Args:
        model: a model of transformers, with an adapter of PEFT or without.
    """
    base = _base(model)
    if not isinstance(base, PreTrainedModel):
        return f"{type(base).__name__} is not a model of transformers"
    config, attention = base.config, base.config._attn_implementation
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    # FlashAttention and flex attention are told of sequences by transformers.
    told = attention == "flex_attention" or "flash" in str(attention)
    replaceable = base._supports_flash_attn and (
        _own_class(base)._can_set_attn_implementation()
    )
    reasons = {
        "has other inputs than text": config.get_text_config(decoder=True)
        is not config,
        "has attention to later tokens": any(
            getattr(module, "is_causal", None) is False for module in base.modules()
        ),
        "takes no position_ids": "position_ids" not in _arguments(base),
        f"has layers ({', '.join(others) or 'with a state'}) that go on from one "
        f"sequence into the next": others or getattr(base, "_is_stateful", False),
        f"has positions by rope_type={rope!r}, of the length of a row": rope in _ROPES,
        f"computes attention by {attention!r}, which needs a mask": not told
        and attention not in ("sdpa", PACKED),
        "does not take another attention than its own": not (told or replaceable),
        "does not tell its attention where sequences begin": not all(
            _hands_on(layer) for layer in _layer_classes(base)
        ),
    }
    found = (reason for reason, holds in reasons.items() if holds)
    return next((f"{type(base).__name__} {reason}" for reason in found), "")


def check_packing(packing: Any) -> None:
    """Refuses a value of ``packing`` that is none."""
    if packing != "auto" and not isinstance(packing, bool):
        raise ConfigurationError(
            f"packing must be 'auto', True or False, got {packing!r}."
        )


def prepare_packing(model: Any, packing: Packing, reason: str = "") -> str:
    """Makes a model read several sequences in one row, if it can and should.

    A model whose attention is PyTorch's ``sdpa`` gets one that computes the sequences
    of a row each alone; for other rows it is ``sdpa``.

    Args:
        model: a model of transformers.
        packing: ``"auto"``, True or False, as for :class:`.CorrectedGRPOLoss`.
        reason: why it cannot, beside its own. Defaults to none.

    Returns:
        str: why it is not to; "" if it is.

    Raises:
        ConfigurationError: if ``packing`` is True and the model cannot, or it is none
            of the three.
    """
    check_packing(packing)
    if packing is False:
        return "packing=False"
    reason = reason or why_padded(model)
    if reason and packing is True:
        raise ConfigurationError(
            f"packing=True is not possible: {reason}; give packing='auto', which pads "
            f"then."
        )
    if not reason and _base(model).config._attn_implementation == "sdpa":
        _base(model).config._attn_implementation = PACKED
    return reason


def packed_terms(
    model: Any,
    tokens: Tensor,
    real: Tensor,
    mask: Tensor,
    *,
    entropy: bool = False,
    sampling: Drawn | None = None,
) -> PackedTokens:
    """Runs a model on the sequences of a batch in one row; only logits of a mask.

    Args:
        model: as :func:`prepare_packing` has made it.
        tokens: ``(sequences, longest)``, padded.
        real: which of them are tokens, likewise.
        mask: which of these are wanted, likewise.
        entropy: whether entropies are.
        sampling: what all tokens were drawn from, likewise. Defaults to None: the whole
            vocabulary at temperature 1.

    Raises:
        ConfigurationError: if a sequence is longer than the model's positions, or a
            wanted token is not in its support.
    """
    real = real.bool()
    lengths = real.sum(-1)
    lengths = lengths[lengths > 0]
    longest = _check_lengths(model, lengths)
    index = real.flatten().cumsum(0).view_as(real) - 1
    # Nothing is before the first token of a sequence.
    first = real & (real.cumsum(-1) == 1)
    wanted = mask.bool() & real & ~first
    logits = _forward(model, tokens[real], lengths, longest, index[wanted] - 1)
    # After the pass, which other ranks take part in: they are told of an error then.
    drawn = None if sampling is None else sampling.of(wanted, tokens)
    log_probs, entropies = token_terms(
        logits, tokens[wanted], entropy=entropy, sampling=drawn
    )
    empty = torch.zeros(mask.shape, dtype=log_probs.dtype, device=mask.device)
    return PackedTokens(
        mask=mask.bool(),
        log_prob=empty.masked_scatter(wanted, log_probs),
        entropy=empty.masked_scatter(wanted, entropies),
    )


def _check_lengths(model: Any, lengths: Tensor) -> int:
    """Returns the length of the longest sequence."""
    if not len(lengths):
        raise ConfigurationError("A batch has no tokens; leave empty responses out.")
    longest = int(lengths.max())
    limit = getattr(_base(model).config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ConfigurationError(
            f"A sequence has {longest} tokens, and the model has positions for {limit} "
            f"(max_position_embeddings); leave such responses out."
        )
    return longest


def _forward(
    model: Any, row: Tensor, lengths: Tensor, longest: int, positions: Tensor
) -> Tensor:
    """Returns the logits of some positions of a row, ``(positions, vocabulary)``."""
    base, ends = _base(model), lengths.cumsum(0)
    begins = (ends - lengths).repeat_interleave(lengths, output_size=len(row))
    order = torch.arange(len(row), device=row.device) - begins
    options: dict[str, Any] = {"attention_mask": None}
    if base.config._attn_implementation != "flex_attention":
        bounds = pad(ends, (1, 0)).to(torch.int32)
        options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        options |= {"max_length_q": longest, "max_length_k": longest}
    if base.config._attn_implementation == PACKED:
        options["attention_mask"] = no_mask(row.device)
    picks = "logits_to_keep" in _arguments(base)
    if picks:
        options["logits_to_keep"] = positions
    output = model(
        input_ids=row.unsqueeze(0),
        position_ids=order.unsqueeze(0),
        use_cache=False,
        **options,
    )
    # An index would have a gradient of its own, as large as the logits.
    logits: Tensor = output.logits.flatten(0, 1)
    return logits if picks else logits[positions]


def _base(model: Any) -> Any:
    """Returns the model of transformers, which ranks or PEFT may have wrapped."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _layer_classes(base: Any) -> Iterator[type]:
    """Yields the classes of a model's layers."""
    names = getattr(base, "_no_split_modules", None) or ()
    classes = {_own_class(module) for module in base.modules()}
    yield from (each for each in classes if each.__name__ in names)


@cache
def _hands_on(layer: type) -> bool:
    """Whether a layer calls its attention with all further arguments of its own.

    Some layers of transformers drop them, and where sequences begin is one of these.
    """
    try:
        source = textwrap.dedent(inspect.getsource(layer.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        # Of code that was made while it runs.
        return True
    return all(
        any(keyword.arg is None for keyword in call.keywords)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func) in ("self.self_attn", "self.attention", "self.attn")
    )


def _arguments(base: Any) -> Any:
    return inspect.signature(base.forward).parameters


def _own_class(model: nn.Module) -> Any:
    """Returns a model's class, of which FSDP2 makes one of its own."""
    kinds = type(model).__mro__
    return next(each for each in kinds if not each.__module__.startswith("torch."))

"""Runs a model on consecutive sequences in one row, without padding."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.attention import PACKED, no_mask
from torchrl_sglang.objectives.routers import own_class
from torchrl_sglang.objectives.routing import replay_of
from torchrl_sglang.objectives.support import Drawn
from torchrl_sglang.objectives.token_terms import token_terms
from torchrl_sglang.objectives.tree import node_values, plan_tree
from torchrl_sglang.support.checks import check_auto

Packing = bool | Literal["auto", "tree"]


def check_packing(name: str, value: Any) -> Packing:
    """Returns a bool, ``"auto"`` or ``"tree"``."""
    if value == "tree":
        return "tree"
    try:
        return check_auto(name, value)
    except ConfigurationError:
        raise ConfigurationError(
            f"{name} must be 'auto', 'tree', True or False, got {value!r}."
        ) from None


_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that restart where attention and positions do."""

_ROPES = {"dynamic", "longrope"}
"""Positions dependent on the length of the whole row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTerms:
    """Outputs of a pass for a loss, ``(sequences, longest)``."""

    mask: Tensor
    log_prob: Tensor
    """Their log-probs; 0 elsewhere, and for the first token of a sequence."""
    entropy: Tensor
    """Entropies of their distributions; 0 elsewhere."""
    id_log_probs: Tensor
    """Log-probs ``(sequences, longest, k)`` of other tokens; 0 elsewhere."""


def why_padded(model: Any) -> str:
    """Returns why a model cannot read several sequences in one row; "" if it can."""
    base = _base(model)
    if not isinstance(base, PreTrainedModel):
        return f"{type(base).__name__} is not a model of transformers"
    config, attention = base.config, base.config._attn_implementation
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    ropes = sorted(_rope_types(config) & _ROPES)
    # transformers passes sequence boundaries to FlashAttention and flex attention.
    bounded = attention == "flex_attention" or "flash" in str(attention)
    base_class: Any = own_class(base)
    replaceable = base._supports_flash_attn and (
        base_class._can_set_attn_implementation()
    )
    layer_names = getattr(base, "_no_split_modules", None) or ()
    classes = {own_class(module) for module in base.modules()}
    reasons = {
        "has other inputs than text": config.get_text_config(decoder=True)
        is not config,
        "has attention to later tokens": any(
            getattr(module, "is_causal", None) is False for module in base.modules()
        ),
        "takes no position_ids": "position_ids" not in _arguments(base),
        f"has layers ({', '.join(other_layers) or 'with a state'}) that go on from one "
        f"sequence into the next": other_layers or getattr(base, "_is_stateful", False),
        "counts positions from its padding token's id": any(
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
            for name, module in base.named_modules()
        ),
        f"has positions by rope_type={next(iter(ropes), None)!r}, of the length of a "
        f"row": ropes,
        f"computes attention by {attention!r}, which needs a mask": not bounded
        and attention not in ("sdpa", PACKED),
        "does not take another attention than its own": not (bounded or replaceable),
        "does not tell its attention the size of its window": bool(
            getattr(config, "sliding_window", None)
        )
        and not all(_has_window(module) for module in classes),
        "does not tell its attention where sequences begin": not all(
            _hands_on(layer) for layer in classes if layer.__name__ in layer_names
        ),
    }
    failures = (reason for reason, holds in reasons.items() if holds)
    return next((f"{type(base).__name__} {reason}" for reason in failures), "")


def _rope_types(config: Any) -> set[Any]:
    """Returns the kinds of rotary positions, which kinds of layers may have apart."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {ropes.get("rope_type") for ropes in (parameters, *nested)}


def prepare_packing(model: Any, packing: Packing, reason: str = "") -> str:
    """Makes a model read several sequences in one row, if it can and should.

    A model whose attention is PyTorch's ``sdpa`` gets an attention for each sequence of
    a row alone; for other rows it is ``sdpa``. Returns the reason against it, or the
    given one; "" if the model packs. Raises :class:`.ConfigurationError` if
    ``packing`` is invalid, or True and the model cannot, or the model is configured for
    a load-balancing loss, which is in none of the losses.
    """
    check_packing("packing", packing)
    if getattr(getattr(_base(model), "config", None), "output_router_logits", False):
        raise ConfigurationError(
            f"{type(_base(model)).__name__} has output_router_logits=True, for a "
            f"load-balancing loss, which is not added to the losses here; set "
            f"model.config.output_router_logits = False."
        )
    if packing is False:
        return "packing=False"
    reason = reason or why_padded(model)
    if reason and packing != "auto":
        raise ConfigurationError(
            f"packing={packing!r} is not possible: {reason}; give packing='auto', "
            f"which pads then."
        )
    if not reason and _base(model).config._attn_implementation == "sdpa":
        _base(model).config._attn_implementation = PACKED
    attention = None if reason else _base(model).config._attn_implementation
    if packing == "tree" and attention != PACKED:
        raise ConfigurationError(
            f"packing='tree' is not possible: {type(_base(model)).__name__} computes "
            f"attention by {attention!r}; load the model with "
            f"attn_implementation='sdpa'."
        )
    return reason


def can_share(model: Any) -> bool:
    """Returns whether a packed model may compute shared prefixes once.

    With dropout, what is shared would have one draw for all of them.
    """
    packs = _base(model).config._attn_implementation == PACKED
    return packs and not any(
        getattr(module, name) for module in model.modules() for name in dropouts(module)
    )


def dropouts(module: torch.nn.Module) -> list[str]:
    """Returns the names of a module's dropout probabilities.

    Layers of transformers have probabilities of their own beside PyTorch's modules.
    """
    kinds = ("attention_dropout", "activation_dropout", "hidden_dropout", "dropout")
    named = [n for n in kinds if isinstance(getattr(module, n, None), float)]
    return ["p", *named] if isinstance(module, torch.nn.Dropout) else named


def packed_terms(
    model: Any,
    tokens: Tensor,
    real: Tensor,
    mask: Tensor,
    *,
    entropy: bool = False,
    sampling: Drawn | None = None,
    ids: Tensor | None = None,
    tree: bool = False,
) -> PassTerms:
    """Runs a model on a batch's sequences in one row; logits of masked tokens only.

    ``tokens`` are padded, ``(sequences, longest)``; ``real`` is false for padding,
    ``mask`` true for the tokens to score, and ``sampling`` has the distributions of all
    tokens. ``ids`` ``(sequences, longest, k)`` are other tokens to score. With
    ``tree``, the model runs once on what sequences share. Raises
    :class:`.ConfigurationError` if a sequence is longer than the model's positions, or
    a scored token is not in its support.
    """
    real = real.bool()
    lengths = real.sum(-1)
    lengths = lengths[lengths > 0]
    _check_lengths(model, lengths)
    index = real.flatten().cumsum(0).view_as(real) - 1
    # The first token of a sequence has no context.
    first = real & (real.cumsum(-1) == 1)
    scored = mask.bool() & real & ~first
    row, context = tokens[real], index[scored] - 1
    if tree:
        logits = _tree_forward(model, row, lengths, context)
    else:
        logits = _forward(model, row, *_sequences(lengths, len(row)), context)
    # After the forward pass, a collective: an earlier error hangs other ranks.
    drawn = None if sampling is None else sampling.of(scored, tokens)
    log_probs, entropies, id_log_probs = token_terms(
        logits,
        tokens[scored],
        entropy=entropy,
        sampling=drawn,
        ids=None if ids is None else ids[scored],
    )
    empty = torch.zeros(mask.shape, dtype=log_probs.dtype, device=mask.device)
    scored_ids = scored.unsqueeze(-1).expand(*mask.shape, id_log_probs.shape[-1])
    return PassTerms(
        mask=mask.bool(),
        log_prob=empty.masked_scatter(scored, log_probs),
        entropy=empty.masked_scatter(scored, entropies),
        id_log_probs=empty.unsqueeze(-1)
        .expand_as(scored_ids)
        .masked_scatter(scored_ids, id_log_probs),
    )


def _check_lengths(model: Any, lengths: Tensor) -> None:
    """Refuses sequences that are longer than the model's positions."""
    if not len(lengths):
        raise ConfigurationError("A batch has no tokens; leave empty responses out.")
    longest = int(lengths.max())
    limit = getattr(_base(model).config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ConfigurationError(
            f"A sequence has {longest} tokens, and the model has positions for {limit} "
            f"(max_position_embeddings); leave such responses out."
        )


def _sequences(lengths: Tensor, total: int) -> tuple[Tensor, dict[str, Any]]:
    """Returns positions and boundaries of consecutive sequences."""
    ends = lengths.cumsum(0)
    begins = (ends - lengths).repeat_interleave(lengths, output_size=total)
    bounds = attention_bounds("q", lengths)
    bounds |= {name.replace("_q", "_k"): bound for name, bound in bounds.items()}
    return torch.arange(total, device=lengths.device) - begins, bounds


def _tree_forward(model: Any, row: Tensor, lengths: Tensor, context: Tensor) -> Tensor:
    """Returns the logits of some tokens of a row, from a pass over its tree."""
    replay = replay_of(model)
    experts = None if replay is None else replay.experts
    tree = plan_tree(node_values(row, experts), lengths)
    bounds = attention_bounds("q", tree.segments) | attention_bounds("k", tree.paths)
    bounds["path_nodes"] = tree.path_nodes
    with ExitStack() as stack:
        if replay is not None and experts is not None:
            of_nodes = experts.to(row.device)[tree.nodes].unsqueeze(0)
            stack.enter_context(replay.using(of_nodes))
        return _forward(
            model, row[tree.nodes], tree.depths, bounds, tree.node_of[context]
        )


def attention_bounds(kind: Literal["q", "k"], lengths: Tensor) -> dict[str, Any]:
    """Returns the boundaries of queries or keys, as attentions take them."""
    return {
        f"cu_seq_lens_{kind}": pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        f"max_length_{kind}": int(lengths.max()),
    }


def _forward(
    model: Any,
    row: Tensor,
    positions: Tensor,
    bounds: dict[str, Any],
    context: Tensor,
) -> Tensor:
    """Returns the logits of some tokens of a row, ``(context, vocabulary)``."""
    base = _base(model)
    options: dict[str, Any] = {"attention_mask": None}
    if base.config._attn_implementation != "flex_attention":
        options |= bounds
    if base.config._attn_implementation == PACKED:
        options["attention_mask"] = no_mask(row.device)
    picks = "logits_to_keep" in _arguments(base)
    if picks:
        options["logits_to_keep"] = context
    output = model(
        input_ids=row.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        **options,
    )
    # An index would have its own gradient, as large as the logits.
    logits: Tensor = output.logits.flatten(0, 1)
    return logits if picks else logits[context]


def _base(model: Any) -> Any:
    """Returns the model of transformers, which ranks or PEFT may have wrapped."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


@cache
def _hands_on(layer: type) -> bool:
    """Returns whether a layer passes all arguments on to its attention."""
    try:
        source = textwrap.dedent(inspect.getsource(layer.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        # Code generated at run time.
        return True
    return all(
        any(keyword.arg is None for keyword in call.keywords)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func) in ("self.self_attn", "self.attention", "self.attn")
    )


@cache
def _has_window(layer: type) -> bool:
    """Returns whether a layer passes the size of its window to its attention."""
    try:
        source = inspect.getsource(layer.forward)  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        return True
    return "attention_interface(" not in source or "sliding_window" in source


def _arguments(base: Any) -> Any:
    return inspect.signature(base.forward).parameters

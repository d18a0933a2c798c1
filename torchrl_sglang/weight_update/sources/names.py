"""From the names of a source to those that a server's loader takes: pure.

Prefixes of wrappers come off, tied weights are sent once, fused parameters are sent in
the parts that a checkpoint has. What does not fit is found here, before the first byte:
a server's loader skips names that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.types import FusedParameter, ModelMetadata, TensorPart
from torchrl_sglang.weight_update.sources.tensors import Described

__all__ = ["Target", "plan_names"]

_LEADING = ("module.", "base_model.model.", "model.")
"""What DDP, PEFT and wrappers put before the names of a module inside."""

_ANYWHERE = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""What torch.compile and wrappers of single layers put into names."""

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
"""Buffers that no checkpoint holds and no loader takes."""

_LISTED = 8
"""How many names an error lists of each kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One tensor that is sent."""

    name: str
    """Name that the server's loader takes."""
    dtype: torch.dtype
    """Type that it is served in."""
    shape: torch.Size
    """Its shape."""
    part: TensorPart | None = None
    """What of the source's tensor it is; ``None`` for all of it."""


def plan_names(
    found: Mapping[str, Described],
    served: ModelMetadata,
    fused: Mapping[str, FusedParameter] | None = None,
) -> dict[str, tuple[Target, ...]]:
    """Returns name in the source -> what is sent of it, in the source's order.

    Args:
        found: what the source has.
        served: what the servers have, under the names that their loader takes.
        fused: name in the module -> what the loader takes of it.

    Raises:
        WeightMismatchError: if tensors are missing, unexpected, or of another shape or
            kind; the message lists them all.
    """
    fused = fused or {}
    plan: dict[str, tuple[Target, ...]] = {}
    owners: dict[str, str] = {}
    unknown: dict[str, str] = {}
    shapes: list[str] = []
    parts: dict[str, TensorPart | None]
    for raw, name in _strip(list(found), served, fused).items():
        whole = fused.get(name)
        if name in served:
            expected, parts = served[name][1], {name: None}
        elif whole is not None:
            expected, parts = whole.shape, {part.name: part for part in whole.parts}
        else:
            unknown[raw] = name
            continue
        twin = next((owners[part] for part in parts if part in owners), None)
        if twin is not None:
            # The same name twice, for example with and without a wrapper's prefix.
            unknown[raw] = f"{raw} (it is {twin}, too)"
            continue
        owners.update(dict.fromkeys(parts, raw))
        if found[raw].shape != expected:
            shapes.append(
                f"{name}: {tuple(found[raw].shape)}, served {tuple(expected)}"
            )
        plan[raw] = tuple(
            Target(
                name=part_name,
                dtype=served[part_name][0],
                shape=served[part_name][1],
                part=part,
            )
            for part_name, part in parts.items()
            if part_name in served
        )
    sent = {found[raw].identity for raw in plan}
    unexpected = [
        name
        for raw, name in unknown.items()
        if found[raw].identity not in sent and not _is_computed(raw, found[raw])
    ]
    kinds = [
        f"{target.name}: {found[raw].dtype}, served {target.dtype}"
        for raw, targets in plan.items()
        for target in targets
        if found[raw].dtype.is_floating_point != target.dtype.is_floating_point
    ]
    missing = [name for name in served if name not in owners]
    _refuse(
        {
            "missing": missing,
            "unexpected": unexpected,
            "of another shape": shapes,
            "of another kind": kinds,
        }
    )
    return plan


def _is_computed(name: str, tensor: Described) -> bool:
    return tensor.computed or name.endswith(_COMPUTED)


def _refuse(problems: Mapping[str, list[str]]) -> None:
    listed = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}"
        + (", ..." if len(names) > _LISTED else "")
        for what, names in problems.items()
        if names
    ]
    if not listed:
        return
    names = problems["unexpected"]
    if any(".lora_" in name or ".base_layer." in name for name in names):
        advice = (
            "The tensors of a PEFT model cannot be merged without it; give the model "
            "itself, not its state dict."
        )
    elif names == ["lm_head.weight"] and not problems["missing"]:
        advice = (
            "The served model has its output layer tied to its input embeddings, and "
            "these are two different tensors; train it tied, or serve a checkpoint "
            "with tie_word_embeddings=False."
        )
    else:
        advice = "Send the model that the server was started with."
    raise WeightMismatchError(
        f"The weights do not fit the served model; nothing was sent. "
        f"{'; '.join(listed)}. {advice}"
    )


def _strip(
    names: list[str], served: ModelMetadata, fused: Mapping[str, FusedParameter]
) -> dict[str, str]:
    """Returns name -> name without what wrappers have put into it.

    A leading prefix that all have is taken off as long as no name gets unknown by it.
    """
    short = [
        ".".join(part for part in name.split(".") if part not in _ANYWHERE)
        for name in names
    ]

    def count_known(candidates: list[str]) -> int:
        return sum(name in served or name in fused for name in candidates)

    while True:
        known = count_known(short)
        for prefix in _LEADING:
            if short and all(name.startswith(prefix) for name in short):
                shorter = [name.removeprefix(prefix) for name in short]
                if known < len(short) and count_known(shorter) >= known:
                    short = shorter
                    break
        else:
            return dict(zip(names, short, strict=True))

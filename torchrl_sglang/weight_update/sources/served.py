"""Maps the names of a source to the names that a server's loader takes. Pure.

Wrappers' prefixes are stripped, tied weights sent once, and fused parameters sent in
the parts of a checkpoint. Everything that does not fit is found before the first byte
is sent, because a server's loader skips names that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.support.wrapped_names import without_wrappers
from torchrl_sglang.types import FusedParameter, ModelMetadata, TensorPart
from torchrl_sglang.weight_update.weights import TensorSpec

_LEADING = ("module.", "base_model.model.", "model.")
"""Prefixes of DDP, PEFT and wrappers."""

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
"""Buffers that no checkpoint holds and no loader takes."""

_LISTED = 8
"""How many names of each kind an error lists."""


def plan_names(
    specs: Mapping[str, TensorSpec],
    served: ModelMetadata,
    fused: Mapping[str, FusedParameter] | None = None,
) -> dict[str, tuple[TensorSpec, ...]]:
    """Maps each name in the source to the tensors that are sent of it.

    ``fused`` maps a name in the module to the parts that the loader takes instead.
    Raises one :class:`WeightMismatchError` that lists all problems.
    """
    fused = fused or {}
    plan: dict[str, tuple[TensorSpec, ...]] = {}
    owners: dict[str, str] = {}
    unknown: dict[str, str] = {}
    shapes: list[str] = []
    parts: dict[str, TensorPart | None]
    for raw, name in _strip(list(specs), served, fused).items():
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
        shape = specs[raw].shape
        if shape != expected:
            shapes.append(f"{name}: {tuple(shape)}, served {tuple(expected)}")
        plan[raw] = tuple(
            TensorSpec(name=each, dtype=dtype, shape=shape, part=part)
            for each, part in parts.items()
            if each in served
            for dtype, shape in [served[each]]
        )
    sent = {specs[raw].identity for raw in plan}
    problems = {
        "missing": [name for name in served if name not in owners],
        "unexpected": [
            name
            for raw, name in unknown.items()
            if not (specs[raw].identity in sent or specs[raw].computed)
            and not raw.endswith(_COMPUTED)
        ],
        "of another shape": shapes,
        "of another kind": [
            f"{target.name}: {specs[raw].dtype}, served {target.dtype}"
            for raw, targets in plan.items()
            for target in targets
            if specs[raw].dtype.is_floating_point != target.dtype.is_floating_point
        ],
    }
    if any(problems.values()):
        raise _mismatch(problems)
    return plan


def _mismatch(problems: Mapping[str, list[str]]) -> WeightMismatchError:
    listed = [
        f"{len(names)} {problem}: {', '.join(names[:_LISTED])}"
        + (", ..." if len(names) > _LISTED else "")
        for problem, names in problems.items()
        if names
    ]
    unexpected = problems["unexpected"]
    advice = "Send the model that the server was started with."
    if any(".lora_" in name or ".base_layer." in name for name in unexpected):
        advice = (
            "The tensors of a PEFT model cannot be merged without it; give the model "
            "itself, not its state dict."
        )
    elif unexpected == ["lm_head.weight"] and not problems["missing"]:
        advice = (
            "The served model has its output layer tied to its input embeddings, and "
            "these are two different tensors; train it tied, or serve a checkpoint "
            "with tie_word_embeddings=False."
        )
    return WeightMismatchError(
        f"The weights do not fit the served model; nothing was sent. "
        f"{'; '.join(listed)}. {advice}"
    )


def _strip(
    names: list[str], served: ModelMetadata, fused: Mapping[str, FusedParameter]
) -> dict[str, str]:
    """Maps each name to the name without wrappers' parts.

    A prefix that all names have is stripped unless fewer names are known without it.
    """
    short = [without_wrappers(name) for name in names]

    def count_known(candidates: list[str]) -> int:
        return sum(name in served or name in fused for name in candidates)

    prefixes = list(_LEADING)
    while prefixes and short and (known := count_known(short)) < len(short):
        prefix = prefixes.pop(0)
        shorter = [name.removeprefix(prefix) for name in short]
        if all(name.startswith(prefix) for name in short) and (
            count_known(shorter) >= known
        ):
            short, prefixes = shorter, list(_LEADING)
    return dict(zip(names, short, strict=True))

"""Maps a source to the served model. Pure.

Wrappers' prefixes are stripped, tied weights sent once, and fused parameters sent in
the parts of a checkpoint. Every mismatch is an error before the first byte is sent,
because a server's loader skips names that it does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.support.wrapped_names import without_wrappers
from torchrl_sglang.types import FusedParameter, ModelMetadata, TensorPart
from torchrl_sglang.weight_update.sources.base import Source, SourceCache
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

_LEADING = ("module.", "base_model.model.", "model.")
"""Prefixes of DDP, PEFT and wrappers."""

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
"""Buffers that no checkpoint holds and no loader takes."""

_LISTED = 8
"""How many names of each kind an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTensors:
    """The weights that servers load."""

    metadata: ModelMetadata
    """Type and shape of each tensor."""
    fused: Mapping[str, FusedParameter] = field(default_factory=dict)
    """Name in the module -> the parts that the loader takes instead."""
    quantized: str | None = None
    """Format of quantised weights, see ``ServerCapabilities.quantized``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamePlan:
    """The served tensors of a source's."""

    memory: object
    """Memory of the source's tensors."""
    served: ServedTensors | None
    names: Mapping[str, tuple[TensorSpec, ...]]
    """Name in the source -> the tensors that are sent of it."""
    specs: tuple[TensorSpec, ...]
    """All of these."""
    device: torch.device
    """Device of most bytes."""

    def fits(self, source: Source, served: ServedTensors | None) -> bool:
        """Returns whether a source's tensors are those that were planned."""
        is_known = source.memory is not None and source.memory is self.memory
        return is_known and served is self.served


def open_weights(
    source: Source,
    served: ServedTensors | None = None,
    cache: SourceCache | None = None,
) -> Weights:
    """Validates a source against the served model.

    A LoRA adapter needs no ``served``: it is sent under its own names. Tensors that are
    still in the memory of the plan in ``cache`` are planned already.
    """
    cache = cache or SourceCache()
    if not (isinstance(cache.plan, NamePlan) and cache.plan.fits(source, served)):
        cache.plan = _plan(source, served)
    plan: NamePlan = cache.plan
    names = plan.names

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        # Nothing here may hold a tensor while the next one is made.
        dtypes = {name: parts[0].dtype for name, parts in names.items()}
        for name, tensor in source.read(dtypes):
            for spec in names[name]:
                yield spec.name, _take(tensor, spec)
            del tensor

    return Weights(
        specs=plan.specs,
        read=read,
        device=plan.device,
        stable=source.stable,
        adapter=source.adapter,
        ranks=source.ranks,
        memory=source.memory,
    )


def _plan(source: Source, served: ServedTensors | None) -> NamePlan:
    names: Mapping[str, tuple[TensorSpec, ...]]
    if served is None:
        names = {name: (spec,) for name, spec in source.specs.items()}
    else:
        names = plan_names(source.specs, served)
        _check_readable(source.specs[name] for name in names)
    return NamePlan(
        memory=source.memory,
        served=served,
        names=names,
        specs=tuple(spec for parts in names.values() for spec in parts),
        device=_main_device(source.specs[name] for name in names),
    )


def _check_readable(specs: Iterable[TensorSpec]) -> None:
    for spec in specs:
        if spec.device.type not in ("cuda", "cpu"):
            raise ConfigurationError(
                f"The weight {spec.name} is on {spec.device}; weights are sent "
                f"from 'cuda' or 'cpu'."
                + (" A tensor there has no values." * (spec.device.type == "meta"))
            )
        if spec.layout != torch.strided:
            raise ConfigurationError(
                f"The weight {spec.name} is {spec.layout}; weights are sent as "
                f"{torch.strided}: give its to_dense()."
            )


def _main_device(specs: Iterable[TensorSpec]) -> torch.device:
    """Returns the device that most bytes are sent from."""
    sizes: Counter[torch.device] = Counter()
    for spec in specs:
        device = spec.device
        if spec.mesh is not None and spec.mesh.device_type != device.type:
            # Shards on the host are gathered on their mesh's devices.
            index = torch.cuda.current_device()
            device = torch.device(spec.mesh.device_type, index)
        sizes[device] += spec.num_bytes
    return max(sizes, key=lambda device: sizes[device], default=torch.device("cpu"))


def _take(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.part is None:
        return tensor
    # A part is described in contiguous memory; this is a view where the tensor is.
    flat = tensor.contiguous()
    offset = flat.storage_offset() + spec.part.offset
    return flat.as_strided(spec.part.shape, spec.part.stride, offset)


def plan_names(
    specs: Mapping[str, TensorSpec], served: ServedTensors
) -> dict[str, tuple[TensorSpec, ...]]:
    """Maps each name in the source to the tensors that are sent of it.

    Raises one :class:`WeightMismatchError` that lists all problems.
    """
    metadata = served.metadata
    plan: dict[str, tuple[TensorSpec, ...]] = {}
    owners: dict[str, str] = {}
    unknown: dict[str, str] = {}
    shapes: list[str] = []
    parts: dict[str, TensorPart | None]
    for raw, name in _strip(list(specs), served).items():
        fused = served.fused.get(name)
        if name in metadata:
            expected, parts = metadata[name][1], {name: None}
        elif fused is not None:
            expected, parts = fused.shape, {part.name: part for part in fused.parts}
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
            TensorSpec(name=target, dtype=dtype, shape=shape, part=part)
            for target, part in parts.items()
            if target in metadata
            for dtype, shape in [metadata[target]]
        )
    identities = {specs[raw].identity for raw in plan}
    problems = {
        "missing": [name for name in metadata if name not in owners],
        "unexpected": [
            name
            for raw, name in unknown.items()
            if not (specs[raw].identity in identities or specs[raw].computed)
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


def _strip(names: list[str], served: ServedTensors) -> dict[str, str]:
    """Maps each name to the name without wrappers' parts.

    A prefix that all names have is stripped unless fewer names are known without it.
    """
    short = [without_wrappers(name) for name in names]

    def count_known(candidates: list[str]) -> int:
        return sum(
            name in served.metadata or name in served.fused for name in candidates
        )

    prefixes = list(_LEADING)
    while prefixes and short and (count := count_known(short)) < len(short):
        prefix = prefixes.pop(0)
        shorter = [name.removeprefix(prefix) for name in short]
        if all(name.startswith(prefix) for name in short) and (
            count_known(shorter) >= count
        ):
            short, prefixes = shorter, list(_LEADING)
    return dict(zip(names, short, strict=True))

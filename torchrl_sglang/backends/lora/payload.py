"""Reads a LoRA adapter in PEFT's format, checks it and completes it for servers.

A tensor with a wrong shape kills a scheduler when the first request selects the
adapter, scaling by the root of the rank is ignored, and an adapter of ``v_proj`` alone
is misread. So everything is checked against the served model before it is sent.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.support.wrapped_names import without_wrappers
from torchrl_sglang.types import ModelMetadata, ServerArgs, ServerCapabilities

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix of parameter names in PEFT."""

_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<side>[AB](?=.*\.weight$)|embedding_[AB])(\.[^.]+){0,2}"
)

_CHANGES_BASE = (
    "PEFT has changed the base weights for it: save it with "
    "path_initial_model_for_weight_conversion=..., or, if the servers serve the "
    "changed weights, write init_lora_weights=True into its configuration"
)

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # PEFT's name: (neutral values, reason why other values are refused)
    "use_dora": ((False,), "SGLang has no DoRA"),
    "bias": (("none",), "SGLang does not load an adapter's biases"),
    "lora_bias": ((False,), "SGLang does not load an adapter's biases"),
    "modules_to_save": (([], ()), "SGLang does not load whole modules"),
    "rank_pattern": (({},), "SGLang has one rank for all modules"),
    "alpha_pattern": (({},), "SGLang has one scale for all modules"),
    "layer_replication": (([],), "SGLang serves the layers of the base model"),
    "trainable_token_indices": (([], {}), "SGLang does not load single embeddings"),
    "target_parameters": (([],), "SGLang adapts modules only"),
    "alora_invocation_tokens": (([],), "SGLang applies an adapter to every token"),
    "use_qalora": ((False,), "SGLang has no QALoRA"),
    "use_bdlora": ((False,), "SGLang has no BD-LoRA"),
    "arrow_config": ((), "SGLang does not route between adapters"),
    "kasa_config": ((), "SGLang has no KaSA"),
    "monteclora_config": ((), "SGLang has no MonteCLoRA"),
    "init_lora_weights": (
        (True, False, "gaussian", "orthogonal", "eva", "mica"),
        _CHANGES_BASE,
    ),
}

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules fused in a server, which needs adapters for all of them."""

_UNCHECKED = re.compile(r"\.experts(\.|$)")
"""Modules whose parameters have different names in transformers and in PEFT."""

MAX_PROBLEMS = 8
"""Number of problems in an error."""

Pair = Mapping[str, torch.Tensor]
"""Side (``"A"``, ``"B"``, ``"embedding_A"``, ``"embedding_B"``) -> tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPayload:
    """Weights and configuration of an adapter as sent; kept for reloads."""

    path: str | None = None
    """Folder or hub name for the servers."""
    tensors: str = field(default="", repr=False)
    """Tensors of the adapter as text, instead of a folder."""
    config: Mapping[str, Any] = field(default_factory=dict)


def prepare_adapter(
    *,
    path: str | os.PathLike[str] | None,
    tensors: Mapping[str, torch.Tensor] | None,
    config: Mapping[str, Any] | None,
    capabilities: ServerCapabilities,
    get_metadata: Callable[[], ModelMetadata],
) -> AdapterPayload:
    """Returns an adapter, checked for the servers; reads the folder if it is local."""
    if (path is None) == (tensors is None):
        raise ConfigurationError(
            "Give a LoRA adapter either as path=... or as tensors=... with config=..."
        )
    if path is not None:
        if config is not None:
            raise ConfigurationError(
                f"The folder {os.fspath(path)!r} holds the adapter's configuration; "
                f"leave config=... out."
            )
        path = os.path.expanduser(path)
        is_here = Path(path).is_dir()
        if not is_here or capabilities.lora_tensors_field is None:
            if is_here:
                _check_folder(Path(path), capabilities.args)
            # A server reads it, relative to its own folder.
            return AdapterPayload(path=str(Path(path).absolute() if is_here else path))
        tensors, config = read_folder(path)
    if config is None:
        raise ConfigurationError(
            "The tensors of a LoRA adapter say nothing of its rank and scale; give the "
            "content of PEFT's adapter_config.json as config=..."
        )
    assert tensors is not None
    checked = check_config(config, capabilities.args)
    complete, checked = check_tensors(tensors, checked, get_metadata())
    return AdapterPayload(tensors=to_text(complete, capabilities.dtype), config=checked)


def read_folder(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of an adapter in PEFT's format."""
    from safetensors.torch import load_file

    folder = Path(path)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"The folder {str(folder)!r} has no {name}: it is not a LoRA adapter; "
                f"save one there with PeftModel.save_pretrained()."
            )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        tensors = load_file(folder / TENSORS_FILE)
    except Exception as error:
        raise ConfigurationError(
            f"The LoRA adapter in {str(folder)!r} cannot be read: {error}"
        ) from error
    return tensors, config


def check_config(config: Mapping[str, Any], args: ServerArgs) -> dict[str, Any]:
    """Returns a configuration for servers; refuses values without an effect there."""
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"The configuration of a LoRA adapter is a {type(config).__name__}; give "
            f"the content of PEFT's {CONFIG_FILE} as a mapping."
        )
    check_kind(config)
    for name, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
        value: Any = config.get(name)
        if type(value) not in kinds or not 0 < value < math.inf:
            raise ConfigurationError(
                f"The configuration of the LoRA adapter has {name}={value!r}; give the "
                f"whole content of PEFT's {CONFIG_FILE}, in which it is a positive "
                f"number."
            )
    rank, limit = config["r"], args.max_lora_rank
    if limit is not None and rank > limit:
        raise ConfigurationError(
            f"The LoRA adapter has the rank r={rank}, and the servers were started "
            f"with max_lora_rank={limit}; start them with max_lora_rank={rank}."
        )
    # Servers always scale by alpha / r.
    scale = math.sqrt(rank) if config.get("use_rslora") else 1
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": config["lora_alpha"] * scale,
        "base_model_name_or_path": str(config.get("base_model_name_or_path") or ""),
    }


def check_kind(config: Mapping[str, Any]) -> None:
    """Refuses an adapter with more than a LoRA adapter's changes to the weights."""
    kind = config.get("peft_type", "LORA")
    if str(getattr(kind, "value", kind)).upper() != "LORA":
        raise ConfigurationError(
            f"The adapter is of the type {kind!r}, and SGLang serves LoRA only."
        )
    for name, (inert, reason) in _REFUSED.items():
        if config.get(name) is not None and config[name] not in inert:
            raise ConfigurationError(
                f"The LoRA adapter has {name}={config[name]!r}, and {reason}. Train it "
                f"without, or merge it and send whole weights."
            )


def _check_folder(folder: Path, args: ServerArgs) -> None:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        # The folder differs from the servers', or they refuse it.
        return
    if check_config(config, args)["lora_alpha"] != config["lora_alpha"]:
        raise ConfigurationError(
            f"The LoRA adapter in {str(folder)!r} has use_rslora=True, and these "
            f"servers read the folder themselves and scale by alpha / r; save it with "
            f"use_rslora=False and lora_alpha={config['lora_alpha']} times the root of "
            f"its rank."
        )


def fits_servers(
    config: Mapping[str, Any], modules: Collection[str], args: ServerArgs
) -> bool:
    """Returns whether servers support an adapter of these modules."""
    try:
        check_config(config, args)
    except ConfigurationError:
        return False
    served = args.lora_target_modules
    if not isinstance(served, (list, tuple)) or set(served) & {"all", "all-linear"}:
        return True
    supported = {name.rpartition(".")[2] for name in served}
    # A fused module includes all its parts.
    supported |= {name for group in _FUSED if supported & {*group} for name in group}
    return supported.issuperset(modules)


def check_tensors(
    tensors: Mapping[str, torch.Tensor], config: dict[str, Any], served: ModelMetadata
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns tensors, under PEFT's names, and configuration, completed for servers."""
    if not isinstance(tensors, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in tensors.values()
    ):
        raise ConfigurationError(
            "The tensors of a LoRA adapter are a mapping of names to tensors; "
            "peft.get_peft_model_state_dict(model) returns one."
        )
    pairs, problems = _pair(tensors)
    for module, pair in pairs.items():
        problems += _problems(module, pair, config["r"], served)
    if not pairs:
        problems.append("there is no tensor in it")
    if problems:
        suffix = ", ..." if len(problems) > MAX_PROBLEMS else ""
        raise WeightMismatchError(
            f"The LoRA adapter does not fit the served model, so it was not sent: "
            f"{'; '.join(problems[:MAX_PROBLEMS])}{suffix}. Train it on the model that "
            f"the servers were started with."
        )
    pairs |= _missing_pairs(pairs, served)
    complete = {
        f"{PREFIX}{module}.lora_{side}{'.weight' if len(side) == 1 else ''}": value
        for module, pair in pairs.items()
        for side, value in pair.items()
    }
    # PEFT also takes a pattern, which has another meaning in SGLang.
    targets = sorted({module.rpartition(".")[2] for module in pairs})
    return complete, {**config, "target_modules": targets}


def _pair(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """Returns module -> tensors of both sides, and unrelated names."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    problems = []
    for name, value in tensors.items():
        match = _NAME.fullmatch(without_wrappers(name).removeprefix(PREFIX))
        if match is None:
            problems.append(f"{name} does not belong to a LoRA adapter")
        else:
            pairs.setdefault(match["module"], {})[match["side"]] = value
    return pairs, problems


def _problems(module: str, pair: Pair, rank: int, served: ModelMetadata) -> list[str]:
    embedding = "embedding_A" in pair
    sides = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    missing = [side for side in sides if side not in pair]
    if missing:
        return [f"{module} has no lora_{missing[0]}"]
    if _UNCHECKED.search(module):
        return []
    if f"{module}.weight" not in served and module != "lm_head":
        return [f"the served model has no module {module}"]
    # An output head tied to the embedding has its shape.
    parameter = served.get(f"{module}.weight", served.get("model.embed_tokens.weight"))
    if parameter is None:
        return []
    rows, columns = reversed(parameter[1]) if embedding else parameter[1]
    return [
        f"{module}.lora_{side} has the shape {tuple(pair[side].shape)}, and with "
        f"r={rank} it is {shape}"
        for side, shape in zip(sides, ((rank, columns), (rows, rank)), strict=True)
        if tuple(pair[side].shape) != shape
    ]


def _missing_pairs(
    pairs: Mapping[str, Pair], served: ModelMetadata
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns neutral adapters for the missing parts of fused modules."""
    added: dict[str, dict[str, torch.Tensor]] = {}
    for module, pair in pairs.items():
        parent, _, leaf = module.rpartition(".")
        parts = next((group for group in _FUSED if leaf in group), ())
        if "A" not in pair or _UNCHECKED.search(module):
            continue
        for name in (f"{parent}.{other}" for other in parts):
            if name in pairs or name in added or f"{name}.weight" not in served:
                continue
            rows, columns = served[f"{name}.weight"][1]
            a, b = pair["A"], pair["B"]
            added[name] = {
                "A": a.new_zeros(a.shape[0], columns),
                "B": b.new_zeros(rows, b.shape[1]),
            }
    return added


def to_text(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> str:
    """Pickles tensors and encodes them in base64, as SGLang's LoRA route expects."""
    copies = {
        # A clone: of a view, the whole storage would be written.
        name: value.detach().to("cpu", dtype).contiguous().clone()
        for name, value in tensors.items()
    }
    return base64.b64encode(pickle.dumps(copies)).decode("ascii")

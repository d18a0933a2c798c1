"""LoRA adapters as servers take them: checked, completed, and written as text. Pure.

A server takes what it is given and finds out later: a tensor of another shape kills its
scheduler when the first request names the adapter, scaling by the root of the rank is
ignored, and an adapter of ``v_proj`` alone is misread. So everything is checked here,
against the parameters of the served model, before any of it is sent.

Format: that of PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``.
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
from torchrl_sglang.types import ModelMetadata, ServerCapabilities

__all__ = ["Content", "prepare_adapter", "read_folder", "to_text", "why_not"]

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model inside."""

_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<side>A|B)(\.(?P<adapter>[^.]+))?\.weight"
    r"|(?P<table>.+)\.lora_embedding_(?P<half>A|B)(\.(?P<other>[^.]+))?"
)

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # name in PEFT's configuration: (values that mean nothing, what else it would mean)
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
}

_STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that a server computes as one, and so wants the adapters of all of them."""

_UNCHECKED = re.compile(r"\.experts(\.|$)")
"""Modules whose parameters transformers and PEFT name differently."""

_LISTED = 8
"""How many names an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What servers are sent of an adapter; kept for those that start later."""

    path: str | None = None
    """Where the servers read it themselves."""
    tensors: str = field(default="", repr=False)
    """Its tensors as text, instead."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its configuration."""


def prepare_adapter(
    *,
    path: str | os.PathLike[str] | None,
    tensors: Mapping[str, torch.Tensor] | None,
    config: Mapping[str, Any] | None,
    capabilities: ServerCapabilities,
    get_metadata: Callable[[], ModelMetadata],
) -> Content:
    """Returns what to send, checked; reads the folder where it is one here.

    Raises:
        ConfigurationError: if the adapter is not given once and whole, or servers do
            not honour what it says.
        WeightMismatchError: if its tensors do not fit the served model.
    """
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
        if not Path(path).is_dir() or capabilities.lora_tensors_field is None:
            return Content(path=os.fspath(path))
        tensors, config = read_folder(path)
    if config is None:
        raise ConfigurationError(
            "The tensors of a LoRA adapter say nothing of its rank and scale; give the "
            "content of PEFT's adapter_config.json as config=..."
        )
    assert tensors is not None
    checked = check_config(config, capabilities.server_args)
    complete, checked = check_tensors(tensors, checked, get_metadata())
    return Content(tensors=to_text(complete, capabilities.dtype), config=checked)


def read_folder(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of an adapter that PEFT has saved.

    Args:
        path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigurationError: if one of the files is missing or cannot be read.
    """
    from safetensors.torch import load_file

    folder = Path(path)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"The folder {str(folder)!r} has no {name}, so it is no LoRA adapter; "
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


def check_config(
    config: Mapping[str, Any], server_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns an adapter's configuration in the form that servers honour.

    Args:
        config: content of ``adapter_config.json``.
        server_args: what the servers say about their own arguments.

    Raises:
        ConfigurationError: if something is missing, or means what no server does.
    """
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"The configuration of a LoRA adapter is a {type(config).__name__}; give "
            f"the content of PEFT's {CONFIG_FILE} as a mapping."
        )
    for name in ("r", "lora_alpha"):
        value: Any = config.get(name)
        kinds = (int,) if name == "r" else (int, float)
        if type(value) not in kinds or not 0 < value < math.inf:
            raise ConfigurationError(
                f"The configuration of the LoRA adapter has {name}={value!r}; give the "
                f"whole content of PEFT's {CONFIG_FILE}, in which it is a positive "
                f"number."
            )
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
    rank, most = config["r"], server_args.get("max_lora_rank")
    if isinstance(most, int) and rank > most:
        raise ConfigurationError(
            f"The LoRA adapter has the rank r={rank}, and the servers were started "
            f"with max_lora_rank={most}; start them with max_lora_rank={rank}."
        )
    alpha = config["lora_alpha"]
    if config.get("use_rslora"):
        # Servers scale by alpha / r, whatever they are told.
        alpha *= math.sqrt(rank)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "base_model_name_or_path": str(config.get("base_model_name_or_path") or ""),
    }


def why_not(
    config: Mapping[str, Any], modules: Collection[str], server_args: Mapping[str, Any]
) -> str | None:
    """Returns why servers do not take an adapter, as a sentence, or None if they do.

    Args:
        config: content of ``adapter_config.json``.
        modules: last parts of the names of the modules that it adapts.
        server_args: what the servers say about their own arguments.

    Examples:
        >>> config = {"r": 16, "lora_alpha": 16}
        >>> why_not(config, ["q_proj"], {"max_lora_rank": 16}) is None
        True
        >>> print(why_not(config, ["o_proj"], {"lora_target_modules": ["q_proj"]}))
        The servers were started with lora_target_modules=['q_proj'], without 'o_proj'.
    """
    try:
        check_config(config, server_args)
    except ConfigurationError as error:
        return str(error)
    served = server_args.get("lora_target_modules")
    if not isinstance(served, (list, tuple)) or set(served) & {"all", "all-linear"}:
        return None
    taken = {name.rpartition(".")[2] for name in served}
    # One of those that are computed together stands for all of them.
    taken |= {name for group in _STACKED if taken & {*group} for name in group}
    lacking = sorted(set(modules) - taken)
    if not lacking:
        return None
    return (
        f"The servers were started with lora_target_modules={sorted(served)}, without "
        f"{', '.join(map(repr, lacking))}."
    )


def check_tensors(
    tensors: Mapping[str, torch.Tensor], config: dict[str, Any], served: ModelMetadata
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns tensors and configuration that servers read as PEFT does.

    Args:
        tensors: name -> tensor, as :func:`peft.get_peft_model_state_dict` has them, or
            with the adapter's name in theirs.
        config: from :func:`check_config`.
        served: parameters of the served model.

    Raises:
        ConfigurationError: if ``tensors`` is no mapping of names to tensors.
        WeightMismatchError: if they do not fit the served model.
    """
    if not isinstance(tensors, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in tensors.values()
    ):
        raise ConfigurationError(
            "The tensors of a LoRA adapter are a mapping of names to tensors; "
            "peft.get_peft_model_state_dict(model) returns one."
        )
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    tables: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, value in tensors.items():
        found = _NAME.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            problems.append(f"{name} is no part of a LoRA adapter")
        elif found["table"]:
            tables[f"{found['table']}.lora_embedding_{found['half']}"] = value
            pairs.setdefault(found["table"], {})[f"embedding_{found['half']}"] = value
        else:
            pairs.setdefault(found["module"], {})[found["side"]] = value
    for module, pair in pairs.items():
        problems += _problems(module, pair, config["r"], served)
    if not pairs:
        problems.append("there is no tensor in it")
    if problems:
        more = ", ..." if len(problems) > _LISTED else ""
        raise WeightMismatchError(
            f"The LoRA adapter does not fit the served model, so it was not sent: "
            f"{'; '.join(problems[:_LISTED])}{more}. Train it on the model that the "
            f"servers were started with."
        )
    linear = _completed({n: p for n, p in pairs.items() if "A" in p}, served)
    complete = {
        f"{PREFIX}{module}.lora_{side}.weight": pair[side]
        for module, pair in linear.items()
        for side in ("A", "B")
    }
    complete |= {PREFIX + name: value for name, value in tables.items()}
    # A pattern, which PEFT allows, is one thing to PEFT and another to SGLang.
    targets = sorted({module.rpartition(".")[2] for module in [*pairs, *linear]})
    return complete, {**config, "target_modules": targets}


def _problems(
    module: str, pair: Mapping[str, torch.Tensor], rank: int, served: ModelMetadata
) -> list[str]:
    """Returns what is wrong with the tensors of one module."""
    sides = ("embedding_A", "embedding_B") if "embedding_A" in pair else ("A", "B")
    missing = [side for side in sides if side not in pair]
    if missing:
        return [f"{module} has no lora_{missing[0]}"]
    if _UNCHECKED.search(module):
        return []
    if f"{module}.weight" not in served and module != "lm_head":
        return [f"{module} is no module of it"]
    # An output head that is tied to the embedding has its shape.
    tied = "model.embed_tokens.weight"
    known = served.get(f"{module}.weight", served.get(tied))
    if known is None:
        return []
    rows, columns = known[1]
    if sides[0] == "embedding_A":
        rows, columns = columns, rows
    problems = []
    for side, shape in ((sides[0], (rank, columns)), (sides[1], (rows, rank))):
        if tuple(pair[side].shape) != shape:
            problems.append(
                f"{module}.lora_{side} has the shape {tuple(pair[side].shape)}, and "
                f"with r={rank} it is {shape}"
            )
    return problems


def _completed(
    pairs: Mapping[str, Mapping[str, torch.Tensor]], served: ModelMetadata
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Adds adapters that do nothing where a server wants those of several modules."""
    complete = dict(pairs)
    for module, pair in pairs.items():
        parent, _, leaf = module.rpartition(".")
        for group in _STACKED:
            if leaf not in group or _UNCHECKED.search(module):
                continue
            for other in group:
                name = f"{parent}.{other}"
                if name in complete or f"{name}.weight" not in served:
                    continue
                shape = served[f"{name}.weight"][1]
                a, b = pair["A"], pair["B"]
                complete[name] = {
                    "A": a.new_zeros(a.shape[0], shape[1]),
                    "B": b.new_zeros(shape[0], b.shape[1]),
                }
    return complete


def to_text(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> str:
    """Returns tensors, by value, in the text form that servers read.

    It holds the numbers themselves and no handle of this process, so it works for
    servers on other machines, and for those that start after this process has ended.

    Args:
        tensors: name -> tensor, on any device.
        dtype: type to cast to; ``None`` for their own.
    """
    copies = {
        # A clone: of a view, the whole storage would be written.
        name: value.detach().to("cpu", dtype).contiguous().clone()
        for name, value in tensors.items()
    }
    return base64.b64encode(pickle.dumps(copies)).decode("ascii")

"""Engine arguments to a command line: pure, no I/O.

Arguments go through under SGLang's own names (``mem_fraction_static=0.8`` becomes
``--mem-fraction-static 0.8``); vLLM's names are translated by one table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError

__all__ = ["VLLM_NAMES", "to_flags", "translate_vllm_names"]

VLLM_NAMES: dict[str, str] = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "max_prefill_tokens",
    "max_num_seqs": "max_running_requests",
    "model": "model_path",
    "model_name": "model_path",
    "num_devices": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "seed": "random_seed",
    "tensor_parallel_size": "tp_size",
    "tokenizer": "tokenizer_path",
    "tokenizer_name": "tokenizer_path",
}
"""vLLM's (and TorchRL's AsyncVLLM's) name -> SGLang's, where the value is the same."""

_NEGATED_FLAGS = {
    # vLLM's switch -> SGLang's switch that turns the same thing off.
    "enable_prefix_caching": "disable_radix_cache",
}

_EQUIVALENT_FLAGS = {
    # vLLM's switch -> SGLang's switch with the same sense.
    "enforce_eager": "disable_cuda_graph",
    "enable_fp32_output": "enable_fp32_lm_head",
}


def translate_vllm_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``arguments`` under SGLang's names.

    Raises:
        ConfigurationError: if the same argument is given under two names.

    Examples:
        >>> translate_vllm_names({"max_model_len": 4096, "enforce_eager": True})
        {'context_length': 4096, 'disable_cuda_graph': True}
    """
    translated: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in arguments.items():
        target = VLLM_NAMES.get(name) or _EQUIVALENT_FLAGS.get(name) or name
        negated = name in _NEGATED_FLAGS
        target = _NEGATED_FLAGS.get(name, target)
        if target in translated:
            raise ConfigurationError(
                f"{origin[target]!r} and {name!r} both set SGLang's {target!r}; "
                f"give one of them."
            )
        translated[target] = not value if negated else value
        origin[target] = name
    return translated


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the command line flags for ``arguments``.

    ``True`` becomes a bare flag; ``False`` and ``None`` leave it out; a list becomes
    several values, a mapping JSON, and a :class:`torch.dtype` its name.

    Raises:
        ConfigurationError: if a name is not an identifier or a value has no text form.

    Examples:
        >>> to_flags({"tp_size": 2, "disable_radix_cache": True, "log_level": None})
        ['--tp-size', '2', '--disable-radix-cache']
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if not name.isidentifier():
            raise ConfigurationError(
                f"{name!r} is not the name of an engine argument; write it with "
                f"underscores, like 'mem_fraction_static'."
            )
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
        elif isinstance(value, (list, tuple)):
            flags += [flag, *(_text(name, item) for item in value)]
        else:
            flags += [flag, _text(name, value)]
    return flags


def _text(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (str, int, float)) or hasattr(value, "__fspath__"):
        return str(value)
    raise ConfigurationError(
        f"The engine argument {name}={value!r} has no form on a command line; give a "
        f"string, a number, a boolean, a list of them, or a mapping."
    )

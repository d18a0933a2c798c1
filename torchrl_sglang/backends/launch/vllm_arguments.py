"""vLLM's engine arguments, and those of TorchRL's ``AsyncVLLM``, under SGLang's names.

Each row of the table renames an argument, drops one that changes nothing here, or
refuses one and says what to give instead. Names without a row go to SGLang unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "ARGUMENTS",
    "VLLM_NAMES",
    "Inert",
    "Refused",
    "Renamed",
    "inert_arguments",
    "translate_vllm_names",
]


@dataclass(frozen=True, slots=True)
class Renamed:
    """An argument that SGLang has under another name."""

    to: str
    """SGLang's name."""
    convert: Callable[[Any], Any] | None = None
    """Converts the value to SGLang's; ``None``: it is the same."""


@dataclass(frozen=True, slots=True)
class Inert:
    """An argument that changes nothing here."""

    reason: str
    """Why it can be dropped; a sentence."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An argument that a server started here cannot honour."""

    reason: str
    """Why, and what to give instead; sentences."""
    unless: tuple[Any, ...] = (None,)
    """Values that SGLang honours anyway; they are dropped."""


def _not(value: Any) -> bool:
    return not value


def _chunk_size(enabled: Any) -> int | None:
    return None if enabled else -1


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _kv_cache_dtype(value: Any) -> Any:
    # vLLM's "fp8" is this one of the two.
    return "fp8_e4m3" if value == "fp8" else _dtype(value)


def _sampling_defaults(value: Any) -> Any:
    return {"vllm": "openai", "auto": "model"}.get(value, value)


_NO_COUNTERPART = Inert("SGLang has no such mechanism to tune or to switch.")

_OWN_WORKERS = Refused(
    "SGLang's workers are its own processes and take no other class."
)

_REPLICAS = Refused(
    "Weight updates need servers without data parallelism; for N copies of the "
    "model give num_replicas=N.",
    unless=(None, 1),
)

_DATA_PARALLEL_DETAIL = Refused(
    "Copies of the model are separate servers here; give num_replicas=N."
)

_MULTI_NODE = Refused(
    "Nodes meet at SGLang's dist_init_addr; give dist_init_addr='HOST:PORT' with "
    "nnodes and node_rank."
)

_SPEAKS_HTTP = Refused(
    "This package speaks HTTP to a server; leave this out.",
    unless=(None, False),
)

ARGUMENTS: dict[str, Renamed | Inert | Refused] = {
    # The model and its files.
    "model": Renamed("model_path"),
    "model_name": Renamed("model_path"),
    "tokenizer": Renamed("tokenizer_path"),
    "tokenizer_name": Renamed("tokenizer_path"),
    "dtype": Renamed("dtype", convert=_dtype),
    "seed": Renamed("random_seed"),
    "max_model_len": Renamed("context_length"),
    "hf_overrides": Renamed("json_model_override_args"),
    "generation_config": Renamed("sampling_defaults", convert=_sampling_defaults),
    "hf_config_path": Refused(
        "SGLang reads config.json from the model's folder; put it there."
    ),
    "code_revision": Refused("SGLang takes all files from one revision=..."),
    "tokenizer_revision": Refused(
        "SGLang takes all files from one revision=..., or give tokenizer_path."
    ),
    "rope_scaling": Refused("Give json_model_override_args={'rope_scaling': ...}."),
    "rope_theta": Refused("Give json_model_override_args={'rope_theta': ...}."),
    "hf_token": Refused("Give environment={'HF_TOKEN': ...}."),
    "task": Refused("Servers generate here.", unless=(None, "auto", "generate")),
    "runner": Refused("Servers generate here.", unless=(None, "auto", "generate")),
    "use_tqdm_on_load": Inert("What a server prints goes to its log."),
    # GPUs.
    "tensor_parallel_size": Renamed("tp_size"),
    "num_devices": Renamed("tp_size"),
    "pipeline_parallel_size": Renamed("pp_size"),
    "data_parallel_size": _REPLICAS,
    "data_parallel_rank": _DATA_PARALLEL_DETAIL,
    "data_parallel_size_local": _DATA_PARALLEL_DETAIL,
    "data_parallel_start_rank": _DATA_PARALLEL_DETAIL,
    "data_parallel_address": _DATA_PARALLEL_DETAIL,
    "data_parallel_rpc_port": _DATA_PARALLEL_DETAIL,
    "data_parallel_backend": _DATA_PARALLEL_DETAIL,
    "num_gpus": Refused(
        "Give tp_size for the GPUs of each server and num_replicas for servers."
    ),
    "enable_expert_parallel": Refused(
        "Give ep_size=N with SGLang.", unless=(None, False)
    ),
    "distributed_executor_backend": Inert(
        "A server always starts its own worker processes."
    ),
    "engine_use_ray": Refused(
        "A server always starts its own worker processes.", unless=(None, False)
    ),
    "master_addr": _MULTI_NODE,
    "master_port": _MULTI_NODE,
    "worker_cls": _OWN_WORKERS,
    "worker_extension_cls": _OWN_WORKERS,
    "scheduler_cls": _OWN_WORKERS,
    # Memory and the cache.
    "gpu_memory_utilization": Renamed("mem_fraction_static"),
    "kv_cache_dtype": Renamed("kv_cache_dtype", convert=_kv_cache_dtype),
    "block_size": Renamed("page_size"),
    "enable_prefix_caching": Renamed("disable_radix_cache", convert=_not),
    "enable_sleep_mode": Renamed("enable_memory_saver"),
    "swap_space": Inert(
        "SGLang computes a retracted request again and swaps nothing out."
    ),
    "num_gpu_blocks_override": Refused(
        "Give max_total_tokens, in tokens rather than blocks."
    ),
    "kv_cache_memory_bytes": Refused(
        "Give max_total_tokens, or the fraction mem_fraction_static."
    ),
    "prefix_caching_hash_algo": _NO_COUNTERPART,
    "preemption_mode": _NO_COUNTERPART,
    "disable_hybrid_kv_cache_manager": _NO_COUNTERPART,
    "calculate_kv_scales": Refused(
        "Give quantization_param_path with the scales.", unless=(None, False)
    ),
    # Scheduling.
    "max_num_seqs": Renamed("max_running_requests"),
    "max_num_batched_tokens": Renamed("max_prefill_tokens"),
    "enable_chunked_prefill": Renamed("chunked_prefill_size", convert=_chunk_size),
    "async_scheduling": Renamed("disable_overlap_schedule", convert=_not),
    "disable_async_output_proc": _NO_COUNTERPART,
    "num_scheduler_steps": _NO_COUNTERPART,
    "scheduler_delay_factor": _NO_COUNTERPART,
    "use_v2_block_manager": _NO_COUNTERPART,
    "scheduling_policy": Refused(
        "Give schedule_policy, or enable_priority_scheduling=True.",
        unless=(None, "fcfs"),
    ),
    # Kernels.
    "enforce_eager": Renamed("disable_cuda_graph"),
    "enable_fp32_output": Renamed("enable_fp32_lm_head"),
    "compile": Inert(
        "SGLang captures CUDA graphs by itself and compiles nothing; give "
        "enable_torch_compile=True for torch.compile."
    ),
    "compilation_config": Refused(
        "Give SGLang's enable_torch_compile and cuda_graph arguments."
    ),
    "cuda_graph_sizes": Refused("Give SGLang's cuda_graph arguments."),
    "max_seq_len_to_capture": Inert(
        "SGLang captures CUDA graphs by batch size, for any length."
    ),
    # LoRA, several modalities, speculation, grammars.
    "max_loras": Renamed("max_loras_per_batch"),
    "max_cpu_loras": Renamed("max_loaded_loras"),
    "lora_dtype": Refused("Adapters take the model's dtype.", unless=(None, "auto")),
    "fully_sharded_loras": Refused(
        "SGLang shards adapters its own way.", unless=(None, False)
    ),
    "limit_mm_per_prompt": Renamed("limit_mm_data_per_request"),
    "mm_processor_kwargs": Refused("Give SGLang's mm_process_config."),
    "speculative_config": Refused(
        "Give SGLang's speculative_algorithm and its other speculative names."
    ),
    "guided_decoding_backend": Refused("Give SGLang's grammar_backend."),
    "structured_outputs_config": Refused("Give SGLang's grammar_backend."),
    "kv_transfer_config": Refused("Give SGLang's disaggregation_mode."),
    # What it says.
    "enable_log_requests": Renamed("log_requests"),
    "disable_log_requests": Renamed("log_requests", convert=_not),
    "disable_log_stats": Inert("A server's statistics go to its log, and no further."),
    "verbose": Inert("What a server prints goes to its log, and no further."),
    "max_logprobs": Inert("SGLang has no limit on log-probabilities."),
    "logprobs_mode": Refused(
        "Log-probabilities are the model's own, as with 'raw_logprobs'; nearest "
        "to 'processed_logprobs' is logprobs_mode='sampling' of SGLangWrapper and "
        "engine.generate().",
        unless=(None, "raw_logprobs"),
    ),
    "override_generation_config": Refused("Give these values as sampling parameters."),
    # SGLang's own, but not for a server that this package starts.
    "config": Refused(
        "Its arguments could not be checked before the start; load the file and "
        "give its contents as arguments."
    ),
    "grpc_mode": _SPEAKS_HTTP,
    "smg_grpc_mode": _SPEAKS_HTTP,
}

VLLM_NAMES: dict[str, str] = {
    name: row.to
    for name, row in ARGUMENTS.items()
    if isinstance(row, Renamed) and row.to != name
}
"""vLLM's (and TorchRL's AsyncVLLM's) name -> SGLang's."""


def translate_vllm_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments under SGLang's names, without those that change nothing.

    Raises:
        ConfigurationError: if an argument is given under two names, or is refused.

    Examples:
        >>> translate_vllm_names({"max_model_len": 4096, "enforce_eager": True})
        {'context_length': 4096, 'disable_cuda_graph': True}
    """
    translated: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in arguments.items():
        row = ARGUMENTS.get(name, Renamed(name))
        if isinstance(row, Inert):
            continue
        if isinstance(row, Refused):
            # Compared by type too: 1 == True, and only one of them may be honoured.
            if any(type(value) is type(own) and value == own for own in row.unless):
                continue
            raise ConfigurationError(
                f"{name}={value!r} cannot be given to an SGLang server that is started "
                f"here. {row.reason}"
            )
        if row.to in translated:
            raise ConfigurationError(
                f"{origin[row.to]!r} and {name!r} both set SGLang's {row.to!r}; "
                f"give one of them."
            )
        convert = row.convert
        translated[row.to] = convert(value) if convert and value is not None else value
        origin[row.to] = name
    return translated


def inert_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the arguments that change nothing, each with the reason.

    Examples:
        >>> inert_arguments({"swap_space": 4, "tp_size": 2})
        {'swap_space': 'SGLang computes a retracted request again and swaps nothing out.'}
    """  # noqa: E501 - A doctest's output is one line.
    rows = ((name, ARGUMENTS.get(name)) for name in arguments)
    return {name: row.reason for name, row in rows if isinstance(row, Inert)}

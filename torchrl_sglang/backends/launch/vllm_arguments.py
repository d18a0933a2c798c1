"""Translation of engine arguments of vLLM and ``AsyncVLLM`` to SGLang's names.

Names in none of these tables go to SGLang unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError

RENAMED: Mapping[str, str] = {
    # The model and its files.
    "model": "model_path",
    "model_name": "model_path",
    "tokenizer": "tokenizer_path",
    "tokenizer_name": "tokenizer_path",
    "seed": "random_seed",
    "max_model_len": "context_length",
    "hf_overrides": "json_model_override_args",
    "generation_config": "sampling_defaults",
    # GPUs and memory.
    "tensor_parallel_size": "tp_size",
    "num_devices": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "enable_prefix_caching": "disable_radix_cache",
    "enable_sleep_mode": "enable_memory_saver",
    # Scheduling and kernels.
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "max_prefill_tokens",
    "enable_chunked_prefill": "chunked_prefill_size",
    "async_scheduling": "disable_overlap_schedule",
    "enforce_eager": "disable_cuda_graph",
    "max_cudagraph_capture_size": "cuda_graph_max_bs_decode",
    "cudagraph_capture_sizes": "cuda_graph_bs_decode",
    "enable_fp32_output": "enable_fp32_lm_head",
    # Arguments of LoRA, multimodal models and logging.
    "max_loras": "max_loras_per_batch",
    "max_cpu_loras": "max_loaded_loras",
    "limit_mm_per_prompt": "limit_mm_data_per_request",
    "enable_log_requests": "log_requests",
    "disable_log_requests": "log_requests",
}
"""vLLM's name -> SGLang's."""


def _not(value: Any) -> bool:
    return not value


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "dtype": _dtype,
    # SGLang has two FP8 types; vLLM's "fp8" is this type.
    "kv_cache_dtype": lambda value: "fp8_e4m3" if value == "fp8" else _dtype(value),
    "generation_config": lambda value: {"vllm": "openai", "auto": "model"}.get(
        value, value
    ),
    "enable_chunked_prefill": lambda value: None if value else -1,
    "enable_prefix_caching": _not,
    "async_scheduling": _not,
    "disable_log_requests": _not,
}
"""vLLM's name -> conversion of its values, other than ``None``, to SGLang's."""

INERT: Mapping[str, str] = {
    "use_tqdm_on_load": "A server's output goes to its log.",
    "distributed_executor_backend": "A server always starts its own worker processes.",
    "swap_space": "SGLang computes a retracted request again and swaps nothing out.",
    **dict.fromkeys(
        (
            "prefix_caching_hash_algo",
            "preemption_mode",
            "disable_hybrid_kv_cache_manager",
            "disable_async_output_proc",
            "num_scheduler_steps",
            "scheduler_delay_factor",
            "use_v2_block_manager",
        ),
        "SGLang has no such mechanism to tune or to switch.",
    ),
    "compile": "SGLang captures CUDA graphs by itself and compiles nothing; give "
    "enable_torch_compile=True for torch.compile.",
    "max_seq_len_to_capture": "SGLang captures CUDA graphs by batch size, for any "
    "length.",
    "disable_log_stats": "A server's statistics go to its log, and no further.",
    "verbose": "A server's output goes to its log, and no further.",
    "max_logprobs": "SGLang has no limit on log-probabilities.",
}
"""Argument without an effect here -> reason."""

_COPIES = "Copies of the model are separate servers here; give num_replicas=N."
_GENERATES = "Servers generate here."
_MEETING = (
    "Nodes meet at SGLang's dist_init_addr; give dist_init_addr='HOST:PORT' with "
    "nnodes and node_rank."
)
_OWN_WORKERS = "SGLang's workers are its own processes and take no other class."
_SPEAKS_HTTP = "This package speaks HTTP to a server; leave this out."

REFUSED: Mapping[str, str] = {
    # The model and its files.
    "hf_config_path": "SGLang reads config.json from the model's folder; put it there.",
    "code_revision": "SGLang takes all files from one revision=...",
    "tokenizer_revision": "SGLang takes all files from one revision=..., or give "
    "tokenizer_path.",
    "rope_scaling": "Give json_model_override_args={'rope_scaling': ...}.",
    "rope_theta": "Give json_model_override_args={'rope_theta': ...}.",
    "hf_token": "Give environment={'HF_TOKEN': ...}.",
    "task": _GENERATES,
    "runner": _GENERATES,
    # Processes and GPUs.
    "data_parallel_size": _COPIES,
    "data_parallel_rank": _COPIES,
    "data_parallel_size_local": _COPIES,
    "data_parallel_start_rank": _COPIES,
    "data_parallel_address": _COPIES,
    "data_parallel_rpc_port": _COPIES,
    "data_parallel_backend": _COPIES,
    "num_gpus": "Give tp_size for each server's GPUs and num_replicas for servers.",
    "enable_expert_parallel": "Give ep_size=N with SGLang.",
    "engine_use_ray": "A server always starts its own worker processes.",
    "master_addr": _MEETING,
    "master_port": _MEETING,
    "worker_cls": _OWN_WORKERS,
    "worker_extension_cls": _OWN_WORKERS,
    "scheduler_cls": _OWN_WORKERS,
    # Memory, scheduling and kernels.
    "num_gpu_blocks_override": "Give max_total_tokens, in tokens rather than blocks.",
    "kv_cache_memory_bytes": "Give max_total_tokens, or the fraction "
    "mem_fraction_static.",
    "calculate_kv_scales": "Give quantization_param_path with the scales.",
    "scheduling_policy": "Give schedule_policy, or enable_priority_scheduling=True.",
    "compilation_config": "Give SGLang's enable_torch_compile or cuda_graph names.",
    "cuda_graph_sizes": "Give cuda_graph_max_bs_decode, or the sizes as "
    "cuda_graph_bs_decode.",
    # LoRA, several modalities, speculation, grammars.
    "lora_dtype": "Adapters take the model's dtype.",
    "fully_sharded_loras": "SGLang shards adapters its own way.",
    "mm_processor_kwargs": "Give SGLang's mm_process_config.",
    "speculative_config": "Give SGLang's speculative_algorithm and its other "
    "speculative names.",
    "guided_decoding_backend": "Give SGLang's grammar_backend.",
    "structured_outputs_config": "Give SGLang's grammar_backend.",
    "kv_transfer_config": "Give SGLang's disaggregation_mode.",
    # Sampling.
    "logprobs_mode": "Log-probabilities are the model's own, as with 'raw_logprobs'; "
    "'processed_logprobs' is logprobs_mode='behaviour' of SGLangWrapper and "
    "engine.generate().",
    "override_generation_config": "Give these values as sampling parameters.",
    # SGLang's own, but not for a server of this package.
    "config": "Its arguments could not be checked before the start; load the file and "
    "give its contents as arguments.",
    "grpc_mode": _SPEAKS_HTTP,
    "smg_grpc_mode": _SPEAKS_HTTP,
}
"""Argument refused for servers of this package -> alternative."""

_HONOURED: Mapping[str, tuple[object, ...]] = {
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "data_parallel_size": (1,),
    "scheduling_policy": ("fcfs",),
    "lora_dtype": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
}
"""Refused argument -> accepted values, beside None and False."""

ARGUMENTS = (*RENAMED, *CONVERTED, *INERT, *REFUSED)
"""All names with a treatment of their own."""


def translate_vllm_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments under SGLang's names, without ineffective arguments."""
    translated: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in arguments.items():
        if name in REFUSED:
            _check_honoured(name, value)
        if name in REFUSED or name in INERT:
            continue
        to = RENAMED.get(name, name)
        convert = CONVERTED.get(name)
        converted = convert(value) if convert and value is not None else value
        if to in translated and (type(converted), converted) != (
            type(translated[to]),
            translated[to],
        ):
            raise ConfigurationError(
                f"{origin[to]!r} and {name!r} both set SGLang's {to!r}; give one of "
                f"them."
            )
        translated[to] = converted
        origin[to] = name
    return translated


def _check_honoured(name: str, value: Any) -> None:
    for honoured in (None, False, *_HONOURED.get(name, ())):
        # Compared by type too: 1 == True, and only one may be honoured.
        if type(value) is type(honoured) and value == honoured:
            return
    raise ConfigurationError(
        f"{name}={value!r} cannot be given to an SGLang server that is started here. "
        f"{REFUSED[name]}"
    )

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.memory_saver import write_saver_python

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.server_command import (
    OF_THE_ENGINE,
    ServerFlag,
    check_local_model,
    check_names,
    find_flags,
    make_server_command,
    parse_flags,
    read_flags,
    to_flags,
)
from torchrl_sglang.backends.launch.vllm_arguments import (
    CONVERTED,
    INERT,
    REFUSED,
    RENAMED,
    translate_vllm_names,
)
from torchrl_sglang.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "translated"),
    [
        ({"tp_size": 2}, {"tp_size": 2}),
        ({"tensor_parallel_size": 2}, {"tp_size": 2}),
        ({"num_devices": 2}, {"tp_size": 2}),
        ({"pipeline_parallel_size": 2}, {"pp_size": 2}),
        ({"gpu_memory_utilization": 0.8}, {"mem_fraction_static": 0.8}),
        ({"max_model_len": 4096}, {"context_length": 4096}),
        ({"max_num_seqs": 8}, {"max_running_requests": 8}),
        ({"max_num_batched_tokens": 8}, {"max_prefill_tokens": 8}),
        ({"seed": 1}, {"random_seed": 1}),
        ({"model": "m"}, {"model_path": "m"}),
        ({"model_name": "m"}, {"model_path": "m"}),
        ({"tokenizer": "t"}, {"tokenizer_path": "t"}),
        ({"tokenizer_name": "t"}, {"tokenizer_path": "t"}),
        ({"enforce_eager": True}, {"disable_cuda_graph": True}),
        ({"max_cudagraph_capture_size": 512}, {"cuda_graph_max_bs_decode": 512}),
        ({"cudagraph_capture_sizes": [1, 8]}, {"cuda_graph_bs_decode": [1, 8]}),
        ({"enable_fp32_output": True}, {"enable_fp32_lm_head": True}),
        ({"enable_prefix_caching": True}, {"disable_radix_cache": False}),
        ({"enable_prefix_caching": False}, {"disable_radix_cache": True}),
        ({"enable_chunked_prefill": False}, {"chunked_prefill_size": -1}),
        ({"enable_chunked_prefill": True}, {"chunked_prefill_size": None}),
        ({"async_scheduling": False}, {"disable_overlap_schedule": True}),
        ({"enable_sleep_mode": True}, {"enable_memory_saver": True}),
        ({"disable_log_requests": True}, {"log_requests": False}),
        ({"block_size": 16}, {"page_size": 16}),
        ({"max_loras": 2}, {"max_loras_per_batch": 2}),
        ({"max_cpu_loras": 4}, {"max_loaded_loras": 4}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"kv_cache_dtype": "fp8_e5m2"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.bfloat16}),
        ({"generation_config": "vllm"}, {"sampling_defaults": "openai"}),
        ({"hf_overrides": {"a": 1}}, {"json_model_override_args": {"a": 1}}),
        # What asks for what holds anyway.
        ({"enable_prefix_caching": None}, {"disable_radix_cache": None}),
        ({"data_parallel_size": 1, "task": "generate", "worker_cls": None}, {}),
        ({"enable_expert_parallel": False, "logprobs_mode": "raw_logprobs"}, {}),
        ({"verbose": True, "compile": False, "swap_space": 4}, {}),
        ({"a_new_flag": 1}, {"a_new_flag": 1}),
        ({}, {}),
    ],
)
def test_translation(given, translated):
    assert translate_vllm_names(given) == translated


@pytest.mark.parametrize(
    "given",
    [
        {"tp_size": 2, "tensor_parallel_size": 3},
        {"tp_size": 1, "tensor_parallel_size": True},
        {"tensor_parallel_size": 2, "num_devices": 4},
        {"enable_prefix_caching": True, "disable_radix_cache": True},
    ],
)
def test_an_argument_under_two_names(given):
    with pytest.raises(ConfigurationError) as caught:
        translate_vllm_names(given)
    assert all(repr(name) in str(caught.value) for name in given)


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"tp_size": 2}, ["--tp-size", "2"]),
        ({"mem_fraction_static": 0.8}, ["--mem-fraction-static", "0.8"]),
        ({"disable_radix_cache": True}, ["--disable-radix-cache"]),
        ({"disable_radix_cache": False, "log_level": None}, []),
        ({"lora_paths": ["a=b", "c=d"]}, ["--lora-paths", "a=b", "c=d"]),
        ({"cuda_graph_bs": (1, 2)}, ["--cuda-graph-bs", "1", "2"]),
        ({"override_args": {"a": 1}}, ["--override-args", '{"a": 1}']),
        ({"dtype": torch.bfloat16}, ["--dtype", "bfloat16"]),
        ({"model_path": Path("/m")}, ["--model-path", "/m"]),
        ({"x": 0}, ["--x", "0"]),
        ({"x": ""}, ["--x", ""]),
        ({"a": 1, "b": True, "c": "d"}, ["--a", "1", "--b", "--c", "d"]),
    ],
)
def test_flags(arguments, flags):
    assert to_flags(arguments, {}) == flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": object()}, ["x=<object", "command line"]),
        ({"x": [object()]}, ["x=<object"]),
        ({"x": {1, 2}}, ["x={1, 2}"]),
    ],
)
def test_arguments_without_a_form(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        to_flags(arguments, {})
    assert all(word in str(caught.value) for word in words)


# --- what vLLM's engine takes

SAME_NAMES = (
    "cpu_offload_gb",
    "device",
    "disable_custom_all_reduce",
    "download_dir",
    "enable_lora",
    "load_format",
    "max_lora_rank",
    "model_impl",
    "nnodes",
    "node_rank",
    "quantization",
    "reasoning_parser",
    "revision",
    "served_model_name",
    "skip_tokenizer_init",
    "tokenizer_mode",
    "trust_remote_code",
)
"""Names that both engines have, for the same thing."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data_parallel_size": 2}, ["data_parallel_size=2", "num_replicas=N"]),
        # Not the one that says what holds anyway.
        ({"data_parallel_size": True}, ["data_parallel_size=True"]),
        ({"num_gpus": 2}, ["tp_size", "num_replicas"]),
        ({"task": "embed"}, ["task='embed'"]),
        ({"speculative_config": {}}, ["speculative_algorithm"]),
        ({"hf_token": "t"}, ["HF_TOKEN"]),
        ({"config": "file.yaml"}, ["config='file.yaml'", "before the start"]),
        ({"grpc_mode": True}, ["HTTP"]),
    ],
)
def test_arguments_that_are_refused(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        translate_vllm_names(arguments)
    assert all(word in str(caught.value) for word in words)


def test_the_tables():
    names = [*RENAMED, *INERT, *REFUSED]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)
    for name, reason in {**INERT, **REFUSED}.items():
        assert reason[0].isupper()
        assert reason.endswith("."), f"{name}: a sentence"
    # An argument is not renamed twice.
    assert not RENAMED.keys() & RENAMED.values()


# --- what a given SGLang takes

OLD_FORM = """
class ServerArgs:
    model_path: str
    tp_size: int = 1

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str)
        parser.add_argument("--tp-size", type=int)
        parser.add_argument(name_of_a_plugin)
"""

NEW_FORM = """
class Serving(Struct):
    _NS_PATH = "serving"
    _hidden = 3
    host: A[str, "The host."] = "127.0.0.1"
    workers: A[Optional[int], Arg(no_cli=True)] = None
    backend: A[str, Arg(help="h", cli_name="--the-backend", aliases=["--be"])] = "a"
    fused: A[bool, Arg(help="h", action=argparse.BooleanOptionalAction)] = True
    internal: int = 3
    group = Derived(doc="no argument")

parser.add_argument("--strict", action=argparse.BooleanOptionalAction)
"""


def test_flags_in_their_older_form():
    flags = parse_flags([OLD_FORM])
    assert {name: flag.flag for name, flag in flags.items()} == {
        "model_path": "--model-path",
        "model": "--model",
        "tp_size": "--tp-size",
    }


def test_flags_in_their_newer_form():
    flags = parse_flags([NEW_FORM, OLD_FORM])
    assert flags["host"] == ServerFlag("--host")
    assert flags["backend"] == ServerFlag(flag="--the-backend")
    assert {"the_backend", "be", "tp_size"} <= flags.keys()
    assert flags["fused"].negatable
    assert flags["strict"].negatable
    assert not {"workers", "internal", "group", "_hidden"} & flags.keys()


@pytest.mark.parametrize("version", cpu.VERSIONS)
def test_the_flags_of_an_engine(version):
    python = str(cpu.engine_python(version))
    flags = find_flags(python, cpu.engine_environment(version))
    assert len(flags) > 400
    assert flags["model"].flag == "--model"
    assert flags["fp8_gemm_runner_backend"].flag == "--fp8-gemm-backend"
    assert flags["lora_strict_loading"].negatable
    # By no field of its own, but by a deprecated flag.
    assert "disable_cuda_graph" in flags
    for name in ("mem_frac", "grpc_worker_threads", "stat_loggers", "help"):
        assert name not in flags
    # A newer flag tells that the overlay was read, and not what it shadows.
    assert ("attn_dp_size" in flags) == (version == cpu.DEFAULT_VERSION)
    # Every translation has somewhere to go.
    assert {*SAME_NAMES, *cpu.default_server_args()} <= flags.keys()
    assert set(RENAMED.values()) <= flags.keys()
    assert CONVERTED.keys() - RENAMED.keys() <= flags.keys()


def test_an_engine_that_cannot_be_read(tmp_path):
    assert find_flags("/no/such/python", {}) == {}
    assert find_flags(sys.executable, {}) == {}
    assert read_flags(tmp_path) == {}
    (tmp_path / "srt").mkdir()
    for source in ("class ServerArgs: pass", "class", "\0"):
        (tmp_path / "srt" / "server_args.py").write_text(source)
        assert read_flags(tmp_path) == {}


FLAGS = parse_flags([NEW_FORM, OLD_FORM])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tp_sizes", "did you mean 'tp_size'?"),
        ("max_model_length", "did you mean 'max_model_len'?"),
        # argparse would take these for the whole names.
        ("tp", "did you mean 'tp_size'?"),
        ("mod", "did you mean 'model_path'?"),
        # Arguments of the engine, not of a server.
        ("num_replica", "did you mean 'num_replicas'?"),
        ("cuda_device", "did you mean 'cuda_devices'?"),
        ("max_restart", "did you mean 'max_restarts'?"),
        ("start_timout", "did you mean 'start_timeout'?"),
        ("max_restarts", "give it to AsyncSGLang.from_pretrained()"),
        ("zzzzzz", "own list"),
    ],
)
def test_a_name_that_the_server_does_not_know(name, words):
    with pytest.raises(ConfigurationError) as caught:
        check_names({"tp_size": 1, name: 2}, FLAGS)
    assert repr(name) in str(caught.value)
    assert words in str(caught.value)
    check_names({name: 2}, {})


@pytest.mark.parametrize("flags", [{}, FLAGS])
@pytest.mark.parametrize("name", ["tp-size", "--x"])
def test_invalid_names_are_refused(name, flags):
    with pytest.raises(ConfigurationError, match=f"'{name}'.*underscores"):
        check_names({name: 2}, flags)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"backend": "b"}, ["--the-backend", "b"]),
        ({"fused": False, "strict": True}, ["--no-fused", "--strict"]),
        ({"fused": None}, []),
        ({"host": -1}, ["--host=-1"]),
    ],
)
def test_flags_of_a_known_server(arguments, line):
    assert to_flags(arguments, FLAGS) == line


def test_arguments_of_the_engine_are_those_of_from_pretrained():
    signature = inspect.signature(AsyncSGLang.from_pretrained).parameters
    # A server has these, too.
    shared = {"model", "tp_size", "dp_size", "device", "python", "api_key"}
    shared |= {"admin_api_key", "timeout", "server_args"}
    assert set(OF_THE_ENGINE) == set(signature) - shared


@pytest.mark.parametrize("size", [1, 4])
def test_two_names_with_equal_values_are_one(size):
    both = {"num_devices": size, "tensor_parallel_size": size}
    assert translate_vllm_names(both) == {"tp_size": size}
    with pytest.raises(ConfigurationError, match="both set SGLang's 'tp_size'"):
        translate_vllm_names({**both, "num_devices": size + 1})


def test_servers_that_shall_sleep_need_the_package_for_it(tiny_model_path, tmp_path):
    with pytest.raises(ConfigurationError, match="no torch_memory_saver"):
        make_server_command(tiny_model_path, device="cpu", enable_memory_saver=True)
    made = make_server_command(
        tiny_model_path,
        device="cpu",
        python=write_saver_python(tmp_path),
        enable_memory_saver=True,
    )
    made.release()
    assert "--enable-memory-saver" in made.line


def test_numpy_values_of_arguments(tiny_model_path):
    flags = to_flags({"tp_size": np.int64(2), "cuda_graph_bs": [np.int32(1), 2]}, {})
    assert flags == ["--tp-size", "2", "--cuda-graph-bs", "1", "2"]


def test_a_folder_with_a_colon_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="'step:100' is an address"):
        check_local_model("step:100")
    (tmp_path / "step:100").mkdir()
    check_local_model("step:100")

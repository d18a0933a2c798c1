from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_sglang.backends.command import to_flags, translate_vllm_names
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
        ({"enable_fp32_output": True}, {"enable_fp32_lm_head": True}),
        ({"enable_prefix_caching": True}, {"disable_radix_cache": False}),
        ({"enable_prefix_caching": False}, {"disable_radix_cache": True}),
        ({"a_new_flag": 1}, {"a_new_flag": 1}),
        ({}, {}),
    ],
)
def test_translation(given, translated):
    assert translate_vllm_names(given) == translated


@pytest.mark.parametrize(
    "given",
    [
        {"tp_size": 2, "tensor_parallel_size": 2},
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
    assert to_flags(arguments) == flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp-size": 2}, ["'tp-size'", "underscores"]),
        ({"--x": 2}, ["'--x'"]),
        ({"x": object()}, ["x=<object", "command line"]),
        ({"x": [object()]}, ["x=<object"]),
        ({"x": {1, 2}}, ["x={1, 2}"]),
    ],
)
def test_arguments_without_a_form(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        to_flags(arguments)
    assert all(word in str(caught.value) for word in words)

"""LoRA adapters on a GPU: loaded, replaced under load, and held to PEFT's answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.adapters import adapter_from_model
from helpers.gpu import NEEDS_GPU, TOLERANCE
from helpers.log_probs import response_difference
from helpers.weights import open_weights

from torchrl_sglang.weight_update.sources.base import unwrap
from torchrl_sglang.weight_update.sources.peft import (
    adapter_source,
)
from torchrl_sglang.weight_update.transports.lora import LoraTransport

pytestmark = NEEDS_GPU

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 2


@torch.no_grad()
def change(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            # Values that both sides hold exactly, whatever they compute in.
            parameter.copy_((0.1 * noise).bfloat16().float())


def make(path: str, seed: int, **config):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    settings = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", **config}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    change(model, seed)
    return model.to("cuda:0").eval()


def adapter_weights(model):
    return open_weights(adapter_source(unwrap(model)), {})


def ask(engine, adapter=None, count=1, **settings):
    return engine.generate(
        input_ids=[PROMPT] * count,
        sampling_params={"max_new_tokens": 16, "ignore_eos": True, **settings},
        return_logprobs=True,
        adapter=adapter,
    )


def difference(answer, model) -> float:
    return response_difference(answer, PROMPT, model, end=64)


def test_adapters_from_memory_and_from_a_folder(
    gpu_lora_engine, gpu_model_path, tmp_path
):
    model = make(gpu_model_path, 1, target_modules=["q_proj", "v_proj"], r=8)
    tensors, config = adapter_from_model(model)
    assert next(iter(tensors.values())).is_cuda
    gpu_lora_engine.load_adapter("memory", tensors=tensors, config=config)
    model.save_pretrained(tmp_path)
    gpu_lora_engine.load_adapter("folder", path=tmp_path, pinned=True)
    try:
        for name in ("memory", "folder"):
            (answer,) = ask(gpu_lora_engine, name)
            assert difference(answer, model) < TOLERANCE
            with model.disable_adapter():
                assert difference(answer, model) > 10 * TOLERANCE
        (base,) = ask(gpu_lora_engine, "")
        with model.disable_adapter():
            assert difference(base, model) < TOLERANCE
    finally:
        for name in ("memory", "folder"):
            gpu_lora_engine.unload_adapter(name)
    assert gpu_lora_engine.adapters == {}


def test_versions_are_published_while_requests_run(gpu_lora_engine, gpu_model_path):
    transport = LoraTransport(gpu_lora_engine)
    models = {version: make(gpu_model_path, int(version) + 1) for version in "123"}
    transport.send(adapter_weights(models["1"]), version="1")
    answers = []
    with ThreadPoolExecutor() as pool:
        for version in "23":
            begun = pool.submit(ask, gpu_lora_engine, count=32, max_new_tokens=512)
            while not gpu_lora_engine.stats().in_flight and not begun.done():
                pass
            transport.send(adapter_weights(models[version]), version=version)
            answers += ask(gpu_lora_engine)
            assert answers[-1].versions[0].version == version
            answers += begun.result()
    seen = set()
    for answer in answers:
        (span,) = answer.versions
        seen.add(span.version)
        assert difference(answer, models[span.version]) < TOLERANCE
    assert {"2", "3"} <= seen
    gpu_lora_engine.unload_adapter("policy")

"""One contract for every transport of the registry, each made from its own options.

On CPU, cuda_ipc sends values instead of handles; ``test/llm/gpu`` has it with handles.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference

from torchrl_sglang.backends import session
from torchrl_sglang.errors import WeightTransferError
from torchrl_sglang.weight_update.sources.peft import adapter_source
from torchrl_sglang.weight_update.sources.resolve import find_source, open_weights
from torchrl_sglang.weight_update.transports.registry import TRANSPORTS

CPU = torch.device("cpu")
OPTIONS = {"disk": lambda folder: {"directory": folder / "weights"}}


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request, lora_engine, tmp_path):
    kind = TRANSPORTS[request.param]
    own = OPTIONS.get(request.param, lambda folder: {})(tmp_path)
    options = kind.options_type(bucket_bytes=20_000, send_timeout=60, **own)
    made = kind(lora_engine, options, device=CPU)
    yield made
    made.close()


def weights_of(model, engine, transport):
    source = adapter_source(model) if transport.adapter_only else find_source(model)
    return open_weights(source, engine.get_model_metadata())


def update(engine, transport, weights):
    known = max(int(v) if v.isdigit() else 0 for v in versions(engine))
    return session.update_weights(
        engine, transport, weights, version=str(1 + known), pause_mode="retract"
    )


def versions(engine):
    return engine.weight_version, engine.newest_version


def test_weights_arrive_and_the_next_ones_replace_them(
    lora_engine, peft_models, transport
):
    for seed in (21, 22):
        model = peft_models.make(seed)
        weights = weights_of(model, lora_engine, transport)
        report = update(lora_engine, transport, weights)
        assert transport.connected
        assert difference(lora_engine, model) < TOLERANCE
        assert report.transport == transport.name
        assert report.num_tensors == len(weights.specs)
        assert report.num_bytes == weights.num_bytes
        assert report.num_buckets >= 1
        assert report.version in versions(lora_engine)


def test_a_source_that_fails_raises_and_the_next_update_heals(
    lora_engine, peft_models, transport
):
    model = peft_models.make(23)
    weights = weights_of(model, lora_engine, transport)

    def read():
        yield from list(weights.read())[:3]
        raise OSError("the source is gone")

    broken = dataclasses.replace(weights, read=read)
    with pytest.raises((WeightTransferError, OSError), match="the source is gone"):
        update(lora_engine, transport, broken)
    update(lora_engine, transport, weights)
    assert difference(lora_engine, model) < TOLERANCE


def test_closing_twice_and_connecting_again(lora_engine, peft_models, transport):
    transport.connect()
    assert transport.connected
    transport.close()
    transport.close()
    model = peft_models.make(24)
    weights = weights_of(model, lora_engine, transport)
    update(lora_engine, transport, weights)
    assert difference(lora_engine, model) < TOLERANCE

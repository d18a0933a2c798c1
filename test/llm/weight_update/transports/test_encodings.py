"""An encoding by somebody else, over every transport: one tensor becomes two."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference
from helpers.weights import open_weights

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.backends.client.capabilities import check_weight_route
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightMismatchError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.encodings.base import (
    WeightEncoding,
    encode_weights,
)
from torchrl_sglang.weight_update.encodings.registry import (
    ENCODINGS,
    encoding_for,
    find_encoding,
)
from torchrl_sglang.weight_update.transports.registry import TRANSPORTS

ENCODED = "down_proj.weight"


class Rounded(WeightEncoding):
    """Values of few bits, and a scale that servers skip, as no parameter has its name.

    That the servers hold the first is seen in their log-probs.
    """

    name = "rounded"

    def plan(self, spec):
        if not spec.name.endswith(ENCODED):
            return (spec,)
        scale = replace(spec, name=f"{spec.name}_scale", shape=torch.Size([3]))
        return spec, scale

    def encode(self, spec, tensor):
        assert spec.name.endswith(ENCODED)
        yield tensor.bfloat16().to(spec.dtype)
        yield torch.arange(3).to(spec.dtype)


def rounded(model):
    """The model as the servers have it then."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ENCODED):
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize(
    "transport",
    sorted(name for name, row in TRANSPORTS.items() if not row.adapter_only),
)
def test_what_is_sent(lora_engine, peft_models, transport, tmp_path):
    engine = lora_engine
    options = {"directory": tmp_path / "weights"} if transport == "disk" else {}
    scheme = SGLangWeightSyncScheme(
        engine,
        transport=transport,
        encoding=Rounded(),
        bucket_bytes=20_000,
        **options,
    )
    sender = scheme.create_sender()
    for seed in (31, 32):
        model = peft_models.make(seed).merge_and_unload()
        # Seen in log-probs, and far from a number of few bits.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(ENCODED):
                    parameter.mul_(20 / 3)
        report = sender.update_weights(model)
        assert difference(engine, rounded(model)) < TOLERANCE
        served = engine.get_model_metadata()
        count = sum(name.endswith(ENCODED) for name in served)
        assert report.num_tensors == len(served) + count
        size = sum(shape.numel() * dtype.itemsize for dtype, shape in served.values())
        assert report.num_bytes == size + count * 3 * 4
    if transport == "disk":
        (index,) = (tmp_path / "weights").glob(f"v{report.version}*/*.index.json")
        files = json.loads(index.read_text())["weight_map"]
        assert sum(name.endswith(f"{ENCODED}_scale") for name in files) == count
    scheme.shutdown()


class Wrong(Rounded):
    name = "wrong"

    def encode(self, spec, tensor):
        yield tensor.double()
        yield tensor


class Twice(Rounded):
    name = "twice"

    def plan(self, spec):
        return spec, spec


class Fp8(Rounded):
    name = "fp8"
    quantized = "fp8"


def test_encoding_errors_are_found_before_sending(restored_engine, hf_model):
    engine = restored_engine
    before = difference(engine, hf_model)
    for encoding, error, words in (
        (Twice(), WeightMismatchError, "makes two tensors of the name"),
        (Fp8(), UnsupportedByServerError, "hold them as 'fp8', and these hold them"),
    ):
        scheme = SGLangWeightSyncScheme(engine, encoding=encoding)
        with pytest.raises(error, match=words):
            scheme.create_sender().update_weights(hf_model)
        assert difference(engine, hf_model) == pytest.approx(before, abs=TOLERANCE)
    scheme = SGLangWeightSyncScheme(engine, encoding=Wrong())
    with pytest.raises(WeightTransferError, match="'wrong' made .*float64"):
        scheme.create_sender().update_weights(hf_model)
    SGLangWeightSyncScheme(engine).create_sender().update_weights(hf_model)


class Sloppy(Rounded):
    """Plans or makes something else."""

    def __init__(self, plan=None, encode=None):
        self.other_plan, self.other_encode = plan, encode

    def plan(self, spec):
        return self.other_plan(spec) if self.other_plan else super().plan(spec)

    def encode(self, spec, tensor):
        return self.other_encode(tensor)


@pytest.mark.parametrize(
    "plan", [lambda spec: (), lambda spec: None, lambda spec: spec.name]
)
def test_a_tensor_of_which_nothing_is_planned(hf_model, plan):
    """The servers would keep the old one, under the new version."""
    served = {n: (p.dtype, p.shape) for n, p in hf_model.named_parameters()}
    with pytest.raises(WeightMismatchError, match="not one TensorSpec or several"):
        encode_weights(open_weights(hf_model, served), Sloppy(plan))


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (lambda tensor: None, r"made \[\] of"),
        (lambda tensor: [tensor.tolist(), 3], "made .*'list'"),
        (lambda tensor: [tensor.mul_(1.0), torch.arange(3.0)], "in place"),
    ],
)
def test_something_else_than_planned(hf_model, encode, words):
    served = {n: (p.dtype, p.shape) for n, p in hf_model.named_parameters()}
    encoded = encode_weights(open_weights(hf_model, served), Sloppy(None, encode))
    with pytest.raises(WeightMismatchError, match=words):
        list(encoded.read())


@pytest.mark.parametrize("given", ["identical", None, Rounded, 3])
def test_unknown_encodings(given):
    with pytest.raises(ConfigurationError, match="nor one of 'auto', 'identity'"):
        SGLangWeightSyncScheme("http://127.0.0.1:1", encoding=given)
    assert find_encoding("identity") is ENCODINGS["identity"]
    with pytest.raises(ConfigurationError, match="verify=True compares"):
        SGLangWeightSyncScheme("http://127.0.0.1:1", encoding=Rounded(), verify=True)


def test_servers_that_an_encoding_is_for(fake_engine):
    capabilities = replace(fake_engine.capabilities, quantized="fp8")
    encoding = Fp8()
    assert encoding_for(encoding, capabilities.quantized) is encoding
    check_weight_route(capabilities, "tensor", quantized=Fp8.quantized)
    for quantized in (None, "int4"):
        with pytest.raises(UnsupportedByServerError, match="hold quantised weights"):
            check_weight_route(capabilities, "tensor", quantized=quantized)


def test_one_tensor_at_a_time_is_encoded(hf_model):
    """Nothing is kept, and what is sent as it is is not copied."""
    served = {n: (p.dtype, p.shape) for n, p in hf_model.named_parameters()}
    weights = open_weights(hf_model, served)
    assert encode_weights(weights, ENCODINGS["identity"]) is weights
    weights = replace(weights, memory=object())
    encoded = encode_weights(weights, Rounded())
    # Every tensor is read.
    assert encoded.memory is None
    assert not encoded.stable
    own = {p.data_ptr() for p in hf_model.parameters()}
    for spec, (name, tensor) in zip(encoded.specs, encoded.read(), strict=True):
        assert (spec.name, spec.shape, spec.dtype) == (name, tensor.shape, tensor.dtype)
        assert (tensor.data_ptr() in own) is (ENCODED not in name)

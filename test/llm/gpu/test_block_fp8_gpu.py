"""Servers that hold FP8 and are filled by weight updates, on a GPU.

The oracle is a server that has read the same weights from a checkpoint that
transformers has quantised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from helpers.gpu import GPUS, LARGE_MODEL, NEEDS_GPU, new_model, start
from helpers.log_probs import PROMPT, difference
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.launch.block_fp8 import QUANTIZATION
from torchrl_sglang.errors import WeightMismatchError, WeightSyncStateError
from torchrl_sglang.testing.tiny_model import save_tiny_model
from torchrl_sglang.types import BLOCK_FP8
from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8, decode
from torchrl_sglang.weight_update.weights import TensorSpec

pytestmark = NEEDS_GPU

SEEDS = (3, 4)
GAP = 0.3
"""Greatest difference of log-probs from those of the weights that FP8 stands for:
activations are quantised, too, and up to 0.2 was seen. Two models of these shapes
differ by about 1."""


def model_of(seed: int) -> torch.nn.Module:
    return new_model(seed, shape=LARGE_MODEL)


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith("_proj.weight")


def write_quantized(model: torch.nn.Module, source: Path, folder: Path) -> Path:
    """Writes what transformers makes of the linear layers, as a checkpoint."""
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        found = quantize({name: tensor}) if is_linear(name, tensor) else {name: tensor}
        tensors |= {key: value.cpu().contiguous() for key, value in found.items()}
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((source / "config.json").read_text())
    described["quantization_config"] = dict(QUANTIZATION)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[Any, AsyncSGLang]]:
    """A server to fill, one of bfloat16, and one for each checkpoint in FP8."""
    folder = tmp_path_factory.mktemp("fp8")
    source = Path(save_tiny_model(folder / "source", **LARGE_MODEL))
    gpu: dict[str, Any] = {"cuda_devices": [GPUS - 1]}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        asked: dict[Any, tuple[Any, dict[str, Any]]] = {
            "filled": (source, {"rollout_dtype": "fp8"}),
            "bfloat16": (source, {}),
        }
        for seed in SEEDS:
            path = write_quantized(model_of(seed), source, folder / str(seed))
            asked[seed] = (path, {})
        started = {
            name: pool.submit(start, path, **gpu, **given)
            for name, (path, given) in asked.items()
        }
        for future in started.values():
            stack.callback(lambda future=future: future.result().shutdown())
        yield {name: future.result() for name, future in started.items()}


def checksums(engine: AsyncSGLang) -> dict[str, str]:
    """Returns SGLang's own sums of what a server holds, dequantised.

    Its FP8 kernels do not compute the same bits twice, so that answers tell less.
    """
    answer = requests.post(
        f"{engine.server_url}/weights_checker", json={"action": "checksum"}, timeout=60
    )
    answer.raise_for_status()
    (rank,) = answer.json()["ranks"]
    found: dict[str, str] = rank["checksums"]
    return found


def test_a_filled_server_is_one_that_read_a_checkpoint(engines):
    engine = engines["filled"]
    with pytest.raises(WeightSyncStateError, match="rollout_dtype='fp8'"):
        engine.generate(input_ids=PROMPT)
    expected = {seed: checksums(engines[seed]) for seed in SEEDS}
    first, second = expected.values()
    assert first.keys() == second.keys()
    assert first != second
    scheme = SGLangWeightSyncScheme(engine)
    sender = scheme.create_sender()
    # Again with the first ones: nothing of the others is left.
    for seed in (*SEEDS, SEEDS[0]):
        report = sender.update_weights(model_of(seed))
        assert report.num_bytes < 0.6 * sum(
            p.numel() * p.element_size() for p in model_of(seed).parameters()
        )
        assert checksums(engine) == expected[seed]
    scheme.shutdown()


class Mistaken(torch.nn.Module):
    """A model that sends its weights, and scores as another one."""

    def __init__(self, sent: torch.nn.Module, scored: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.others = sent, [scored]

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.others[0](input_ids=input_ids)


def test_verify_knows_servers_that_hold_fp8(engines):
    scheme = SGLangWeightSyncScheme(engines["filled"], verify=True)
    sender = scheme.create_sender()
    report = sender.update_weights(model_of(SEEDS[1]))
    assert report.phase_seconds["verify"] > 0
    with pytest.raises(WeightMismatchError, match="log-probs differ"):
        sender.update_weights(Mistaken(model_of(SEEDS[1]), model_of(7)).eval())
    sender.update_weights(model_of(SEEDS[0]))
    assert checksums(engines["filled"]) == checksums(engines[SEEDS[0]])
    scheme.shutdown()


def test_a_checkpoint_in_fp8_that_is_served_takes_updates(engines):
    """Nobody started it with ``rollout_dtype="fp8"``; it holds what is sent later."""
    engine = engines[SEEDS[1]]
    assert engine.capabilities.quantized == BLOCK_FP8
    scheme = SGLangWeightSyncScheme(engine)
    try:
        scheme.create_sender().update_weights(model_of(SEEDS[0]))
        assert checksums(engine) == checksums(engines[SEEDS[0]])
    finally:
        scheme.create_sender().update_weights(model_of(SEEDS[1]))
        scheme.shutdown()


def test_log_probs_are_those_of_the_weights_that_fp8_stands_for(engines):
    scheme = SGLangWeightSyncScheme(engines["filled"])
    model = model_of(SEEDS[0])
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    encoding = BlockFP8()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_linear(name, parameter):
                spec = TensorSpec(
                    name=name, dtype=parameter.dtype, shape=parameter.shape
                )
                parameter.copy_(decode(*encoding.encode(spec, parameter)))
    gap = difference(engines["filled"], model, length=16)
    assert gap < GAP
    assert difference(engines["filled"], model_of(7), length=16) > 2 * GAP

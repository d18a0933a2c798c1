"""Every transport of the registry keeps the contract, each made from its own options.

On CPU, cuda_ipc sends values instead of handles; ``test/llm/gpu`` has it with handles.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference
from helpers.weights import open_weights

from torchrl_sglang.errors import WeightTransferError
from torchrl_sglang.testing.transport_contract import TransportContract
from torchrl_sglang.weight_update.sources.base import unwrap
from torchrl_sglang.weight_update.sources.peft import adapter_source
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.transports.registry import TRANSPORTS

CPU = torch.device("cpu")
OPTIONS = {"disk": lambda folder: {"directory": folder / "weights"}}


class _Tests(TransportContract):
    tolerance = TOLERANCE

    @pytest.fixture(autouse=True)
    def _use(self, name, lora_engine, peft_models, tmp_path):
        self.kind = TRANSPORTS[name]
        self.engine = lora_engine
        self.models = {}
        self.new_model = peft_models.make
        self.folder = tmp_path

    def make(self):
        own = OPTIONS.get(self.kind.name, lambda folder: {})(self.folder)
        options = self.kind.options_type(bucket_bytes=20_000, send_timeout=60, **own)
        return self.kind(self.engine, options, device=CPU)

    def model(self, seed):
        if seed not in self.models:
            self.models[seed] = self.new_model(seed)
        return self.models[seed]

    def weights(self, seed):
        model = self.model(seed)
        if self.kind.adapter_only:
            source = adapter_source(unwrap(model))
        else:
            source = find_source(model)
        return open_weights(source, self.engine.get_model_metadata())

    def error(self, seed):
        return difference(self.engine, self.model(seed))


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
class TestTransports(_Tests):
    pass


class _Careless(TRANSPORTS["cuda_ipc"]):
    """Sends other values than it is given, and keeps what goes wrong to itself."""

    def send(self, weights, *, version):
        def read():
            with suppress(OSError):
                for name, tensor in weights.read():
                    yield name, 1.5 * tensor

        return super().send(replace(weights, read=read, stable=False), version=version)


@pytest.mark.parametrize("name", ["cuda_ipc"])
class TestThatFails(_Tests):
    """The contract finds a transport that does not keep it."""

    def make(self):
        return _Careless(self.engine, device=CPU)

    @pytest.fixture(autouse=True)
    def _fails(self, request):
        request.applymarker(
            pytest.mark.xfail(
                raises=(AssertionError, WeightTransferError),
                strict=True,
                reason="on purpose",
            )
        )

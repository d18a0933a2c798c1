"""A trainer's NCCL group, formed as vLLM does, lands in servers on other GPUs.

The trainer is a process with SGLang's copies of vLLM's ``StatelessProcessGroup`` and
``PyNcclCommunicator``, which TRL's ``WeightTransferClient`` calls; or TRL itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model, start
from safetensors.torch import load_file

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.vllm.broadcasts import LOADER, NCCL_DEFAULTS
from torchrl_sglang.gateway.vllm.dialect import VLLM

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(GPUS < 2, reason="it needs two GPUs")]

TRL_PATH = os.environ.get("TRL_PYTHONPATH")
"""Folder of TRL and vLLM, which need other packages than SGLang."""

PROGRAM = Path(__file__).parents[2] / "agents" / "clients" / "trl_rollouts.py"
UPDATES = 20

TRAINER = """
import sys
import torch
from helpers import vllm_trainer
from helpers.gpu import new_model
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
from sglang.srt.distributed.utils import StatelessProcessGroup

class Group:
    def __init__(self, info):
        names = ("master_address", "master_port", "world_size")
        host, port, size = (info[name] for name in names)
        group = StatelessProcessGroup.create(host, port, 0, size)
        self._nccl = PyNcclCommunicator(group, device="cuda:0")
        self._nccl.disabled = False

    def broadcast(self, tensor, src):
        self._nccl.broadcast(tensor, src)
        torch.cuda.synchronize()

vllm_trainer.trainer_init = Group
trainer = vllm_trainer.Trainer(sys.argv[1])
trainer.join()
for seed in (3, 4):
    trainer.update(new_model(seed), parts=seed - 2)
"""


@contextmanager
def serving(path: str, ranks: int) -> Iterator[Gateway]:
    """VLLM's protocol in front of a server on the GPUs after the first."""
    balance = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    with (
        start(
            path,
            cuda_devices=list(range(1, 1 + ranks)),
            tensor_parallel_size=ranks,
            weight_loader="traced",
            custom_weight_loader=[LOADER],
            environment={**NCCL_DEFAULTS, **balance},
        ) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
    ):
        yield gateway


@pytest.fixture(autouse=True)
def default_of_nccl(monkeypatch):
    """A sender of another test may have set the variable for its servers."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_weights_over_nccl(gpu_model_path, tmp_path, ranks):
    if ranks >= GPUS:
        pytest.skip("the trainer has a GPU of its own")
    with serving(gpu_model_path, ranks) as gateway:
        command = [sys.executable, "-c", TRAINER, gateway.url]
        # The program imports the helpers of this folder, too.
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, check=True, timeout=300, env=known)
        engine = gateway.engine
        assert engine.weight_version == "2"
        assert difference(engine, new_model(4)) < TOLERANCE
        assert difference(engine, new_model(3)) > 10 * TOLERANCE
        # An update of our own sender is verified against the same servers.
        options = {"directory": tmp_path}
        scheme = SGLangWeightSyncScheme(engine, transport="disk", **options)
        scheme.create_sender().update_weights(new_model(5), verify=True)
        scheme.shutdown()


@pytest.mark.skipif(not TRL_PATH, reason="TRL_PYTHONPATH has no TRL and vLLM")
def test_trl_s_own_transfer(gpu_model_path, tmp_path):
    """TRL's rollouts and weights through vLLM's own communicator, unmodified."""
    job = {
        "model": gpu_model_path,
        "out": str(tmp_path),
        "updates": UPDATES,
        "samples": 8,
        "tokens": 16,
    }
    with serving(gpu_model_path, 1) as gateway:
        arguments = json.dumps({**job, "url": gateway.url})
        command = [sys.executable, str(PROGRAM), arguments]
        known = {**os.environ, "PYTHONPATH": str(TRL_PATH), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, timeout=400, env=known)
        engine, model = gateway.engine, new_model(0, torch.float32)
        assert engine.weight_version == str(UPDATES)
        assert difference(engine, model.to(torch.bfloat16)) > 10 * TOLERANCE
        model.load_state_dict(load_file(tmp_path / f"{UPDATES}.safetensors"))
        assert difference(engine, model.to(torch.bfloat16)) < TOLERANCE

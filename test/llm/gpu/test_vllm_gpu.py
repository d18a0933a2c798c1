"""A trainer's NCCL group, formed as vLLM does, lands in servers on other GPUs.

The trainer is a process with SGLang's copies of vLLM's ``StatelessProcessGroup`` and
``PyNcclCommunicator``, which TRL's ``WeightTransferClient`` calls.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model, start

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.vllm.broadcasts import LOADER, NCCL_DEFAULTS
from torchrl_sglang.gateway.vllm.dialect import VLLM

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(GPUS < 2, reason="it needs two GPUs")]

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


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_weights_over_nccl(gpu_model_path, tmp_path, monkeypatch, ranks):
    if ranks >= GPUS:
        pytest.skip("the trainer has a GPU of its own")
    # A communicator of this process may have read it, and set it for its servers.
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    balance = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    with (
        start(
            gpu_model_path,
            cuda_devices=list(range(1, 1 + ranks)),
            tensor_parallel_size=ranks,
            weight_loader="traced",
            custom_weight_loader=[LOADER],
            environment={**NCCL_DEFAULTS, **balance},
        ) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
    ):
        command = [sys.executable, "-c", TRAINER, gateway.url]
        # The program imports the helpers of this folder, too.
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, check=True, timeout=300, env=known)
        model = new_model(4)
        assert engine.weight_version == "2"
        assert difference(engine, model) < TOLERANCE
        assert difference(engine, new_model(3)) > 10 * TOLERANCE
        # An update of our own sender is verified against the same servers.
        options = {"directory": tmp_path}
        scheme = SGLangWeightSyncScheme(engine, transport="disk", **options)
        scheme.create_sender().update_weights(new_model(5), verify=True)
        scheme.shutdown()

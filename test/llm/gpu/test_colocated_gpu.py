"""Several ranks of a trainer, and servers on their GPUs or on one after them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE
from helpers.torchrun import run_ranks

pytestmark = NEEDS_GPU

PROGRAM = Path(__file__).with_name("colocated_program.py")
LIMIT_SECONDS = 400.0


def launch(*arguments, **environment):
    printed = run_ranks(
        PROGRAM, *arguments, python=sys.executable, timeout=LIMIT_SECONDS, **environment
    )
    found = json.loads(printed.strip().splitlines()[-1])
    sys.stdout.write(f"{found}\n")
    return found


def test_each_server_opens_the_memory_of_a_rank(gpu_model_path):
    """Two ranks and two servers, on two GPUs or on the same one."""
    found = launch("updates", gpu_model_path)
    assert found["transport"] == "cuda_ipc"
    assert found["requests"] > 1
    # Each rank made the handles of one server.
    assert found["packed"] == [found["requests"]] * 2
    assert len(found["differences"]) == 6
    assert max(found["differences"]) < TOLERANCE


@pytest.mark.skipif(GPUS < 2, reason="a server over two GPUs needs them")
def test_each_rank_of_a_server_opens_the_memory_of_a_rank(gpu_model_path):
    found = launch("updates", gpu_model_path, TP_SIZE="2")
    assert found["packed"] == [found["requests"]] * 2
    assert max(found["differences"]) < TOLERANCE


@pytest.mark.skipif(GPUS < 2, reason="each rank needs a GPU of its own")
def test_a_colocated_run_of_two_ranks(gpu_model_path, tmp_path):
    found = launch("train", gpu_model_path, tmp_path / "run")
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert found["metrics"]["train/kl_approx"] < 0.1


@pytest.mark.skipif(GPUS < 3, reason="a server after the ranks' GPUs needs a third one")
def test_a_run_of_two_ranks_whose_server_is_elsewhere(gpu_model_path, tmp_path):
    """NCCL is begun by the ranks, and serves the update as well."""
    found = launch("train", gpu_model_path, tmp_path / "run", APART="1")
    assert found["transport"] == "broadcast"
    assert found["metrics"]["train/kl_approx"] < 0.1

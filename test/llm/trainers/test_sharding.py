"""FSDP2 over ranks, beside one process and transformers' own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.sharding import CASES, batch_of, make_learner, save_models
from helpers.torchrun import run_ranks
from transformers import AutoModelForCausalLM

from torchrl_sglang.trainers.checkpoints import Checkpoints
from torchrl_sglang.trainers.ranks import TrainerRanks

# TorchRL's own, about what is deprecated in torch.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAM = Path(__file__).with_name("shard_program.py")
ALONE = TrainerRanks()
EXACT = [case for case in CASES if case != "lora_half"]
"""Passes of ranks are padded to other lengths, which bfloat16 rounds otherwise."""


def train_alone(folder, case):
    """Trains on two batches, with a checkpoint between them."""
    learner = make_learner(folder, case, ALONE)
    learner.train(batch_of(0, ALONE), 0)
    checkpoints = Checkpoints(folder / f"{case}_before", identity={})
    checkpoints.save(1, learner)
    learner.train(batch_of(1, ALONE), 0)
    checkpoints.wait()
    return learner


def tensors(learner):
    """Everything that is trained, and the optimizer's state."""
    state = learner.state_dict()
    values = {f"model {name}": each for name, each in state["model"].items()}
    for name, each in state["optimizer"]["state"].items():
        values |= {f"{kind} {name}": value for kind, value in each.items()}
    return values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that began alone, and went on with two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    with torch.random.fork_rng(devices=[]):
        save_models(folder)
        alone = {case: train_alone(folder, case) for case in CASES}
    run_ranks(PROGRAM, folder, *CASES)
    return folder, alone


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_do_what_one_process_does(runs, case):
    """From one process to two ranks and back: weights and optimizer are the same."""
    folder, alone = runs
    checkpoints = Checkpoints(folder / f"{case}_after", identity={})
    assert checkpoints.load(True)["gathered"] == [0, 1]
    resumed = make_learner(folder, case, ALONE)
    checkpoints.restore(resumed)
    assert resumed.steps == 2
    found, expected = tensors(resumed), tensors(alone[case])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6)
    new = tensors(make_learner(folder, case, ALONE))
    moved = [(new[name] - each).abs().max() for name, each in expected.items()]
    assert max(moved) > 1e-3


@pytest.mark.parametrize("case", EXACT)
def test_transformers_reads_the_model(runs, case):
    folder, _ = runs
    resumed = make_learner(folder, case, ALONE)
    Checkpoints(folder / f"{case}_after", identity={}).restore(resumed)
    tokens = torch.arange(5, 25)[None]
    read = AutoModelForCausalLM.from_pretrained(folder / f"{case}_model")
    with torch.no_grad():
        expected = resumed.model.eval()(tokens).logits
        assert torch.equal(read.eval()(tokens).logits, expected)


@pytest.mark.slow
def test_four_ranks_go_on_where_two_were(runs):
    folder, alone = runs
    for case in ("tied", "lora"):
        (folder / f"{case}_before").rename(folder / f"{case}_first")
        (folder / f"{case}_after").rename(folder / f"{case}_before")
    run_ranks(PROGRAM, folder, "tied", "lora", ranks=4)
    for case in ("tied", "lora"):
        alone[case].train(batch_of(1, ALONE), 0)
        resumed = make_learner(folder, case, ALONE)
        Checkpoints(folder / f"{case}_after", identity={}).restore(resumed)
        for name, value in tensors(alone[case]).items():
            torch.testing.assert_close(
                tensors(resumed)[name], value, rtol=1e-5, atol=4e-6, msg=name
            )

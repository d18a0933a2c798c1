"""What a run collects and evaluates, on a server that computes nothing."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from torchrl_sglang import GRPO

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [{"query": f"q{number}"} for number in range(6)]


class Streamed:
    """As a streamed dataset: without a length, and read again from its beginning."""

    def __iter__(self):
        return iter(ROWS)


def sample(conversation, task):
    return float(conversation.sample)


@pytest.fixture
def make(fake_engine, tiny_model_path, tmp_path):
    """Makes a run on the server."""
    (tmp_path / "weights").mkdir()

    def made(**arguments):
        given = {
            "prompts": ROWS,
            "rewards": sample,
            "group_size": 2,
            "groups_per_batch": 2,
            "generate_kwargs": {"max_new_tokens": 4},
            "engine": fake_engine,
            "weight_sync": {"directory": tmp_path / "weights"},
            "output": tmp_path / "run",
            "logger": None,
            "recorder": False,
            "show_samples": None,
        }
        return GRPO(tiny_model_path, **{**given, **arguments})

    with torch.random.fork_rng(devices=[]):
        yield made


def rollouts_of(folder):
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_passes_over_a_stream_end_and_go_on(make, tmp_path):
    class Interrupted(Exception):
        pass

    passes = {"prompts": Streamed(), "epochs": 2, "checkpoint_every": 1}
    interrupted = make(**passes)
    with interrupted, pytest.raises(Interrupted):
        interrupted.begin()
        for batch in interrupted.batches():
            interrupted.step += 1
            interrupted.learner.train(batch, interrupted.collector.policy_version)
            interrupted.update_weights()
            interrupted.save()
            # In the second pass.
            if interrupted.step == 4:
                raise Interrupted
    run = make(**passes, resume=True)
    run.train()
    assert run.step == 6
    rows = rollouts_of(tmp_path / "run")
    assert Counter(row["prompt"] for row in rows) == {
        row["query"]: 2 * 2 for row in ROWS
    }


@pytest.mark.parametrize("size", [None, 2, 4])
def test_a_pass_over_a_data_loader_has_all_its_tasks(make, size):
    assert make(prompts=DataLoader(ROWS, batch_size=size)).steps == 3
    assert make(prompts=DataLoader(ROWS, batch_size=size), epochs=2).steps == 6


def test_batches_of_held_out_prompts_are_taken_apart(make):
    run = make(eval_prompts=DataLoader(ROWS, batch_size=4), steps=1)
    assert [task["query"] for task in run._collecting.eval_prompts] == [
        row["query"] for row in ROWS
    ]

"""What a run tells at its end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_sglang.errors import CheckpointError
from torchrl_sglang.objectives.advantages import REWARD
from torchrl_sglang.trainers.report import (
    Rollouts,
    describe,
    describe_held_out,
    describe_rows,
    sample_of,
    summarize,
)
from torchrl_sglang.trainers.samples import rows_of


def test_what_bounds_a_run():
    totals = {"collect": 6.0, "train": 3.0, "update": 1.0}
    said = "Training bounds the run: batches are complete."
    line = summarize(totals, said, in_turn=True)
    assert line.startswith("Generation bounds the run (")
    assert summarize(totals, said, in_turn=False).startswith(said.rstrip("."))
    slow = "The environment bounds the run: 4 of 4 wait."
    assert summarize(totals, slow, in_turn=True).startswith(slow.rstrip("."))
    for in_turn in (False, True):
        line = summarize({**totals, "save": 10.0}, said, in_turn=in_turn)
        assert line.startswith("Writing checkpoints bounds the run (collect 30%")


def test_rollouts_on_a_disk_without_room():
    rollouts = Rollouts(Path("/dev/full"))
    columns = {
        REWARD: torch.zeros(1, 1, 1),
        "advantage": torch.zeros(1, 1, 1),
        ("tokens", "response"): torch.zeros(1, 3),
    }
    batch = TensorDict(columns, batch_size=1)
    with pytest.raises(CheckpointError, match="/dev/full cannot be written.*Make room"):
        rollouts.write(1, batch, "query")
    rollouts.close()


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rollouts_are_json(tmp_path, value):
    """A number that is not finite has no form in JSON; a half of a character has."""
    rollouts = Rollouts(tmp_path / "rollouts.jsonl")
    columns = {
        REWARD: torch.full((1, 1, 1), value),
        "advantage": torch.full((1, 1, 1), value),
        ("tokens", "response"): torch.zeros(1, 3),
    }
    batch = TensorDict(columns, batch_size=1).set("query", NonTensorData("a\ud800b"))
    rollouts.write(1, batch, "query")
    rollouts.close()
    (line,) = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert row["reward"] is row["advantage"] is None
    assert row["tokens"] == 3


def row_of_agent(written, between, *, cut=None, reward=(1.0,)):
    """Returns a trajectory: two turns, and tokens between that others wrote."""
    mine = torch.tensor([True] * written + [False] * between + [True] * written)
    row = TensorDict(
        question="Why?",
        advantage=torch.zeros(1, 1),
        tokens=TensorDict(response=torch.zeros(len(mine))),
        masks=TensorDict(all_assistant_mask=torch.cat([torch.zeros(4).bool(), mine])),
        token_policy_version=torch.where(mine, 3, -1),
        next=TensorDict(
            reward=torch.tensor(reward).unsqueeze(-1), done=torch.ones(1).bool()
        ),
    )
    if cut is not None:
        row["generation_info"] = TensorDict(truncated=torch.tensor(cut))
    return row


def test_tokens_of_an_agents_run_are_those_that_the_policy_wrote():
    batch = lazy_stack([row_of_agent(2, 50), row_of_agent(3, 9)])
    found = describe(batch, policy_version=3, group_size=2)
    assert found["batch/tokens"] == 10.0
    assert found["batch/response_tokens"] == 5.0
    assert [row["tokens"] for row in rows_of(1, batch, "question")] == [4, 6]
    # A turn that an earlier row has is not counted again.
    batch[0]["masks", "all_assistant_mask"][4:6] = False
    found = describe(batch, policy_version=3, group_size=2)
    assert found["batch/tokens"] == 8.0


def test_cut_off_responses_are_reported_where_known():
    about = {"policy_version": 3, "group_size": 2}
    unknown = lazy_stack([row_of_agent(2, 50), row_of_agent(3, 9)])
    assert "batch/truncated" not in describe(unknown, **about)
    assert "eval/truncated" not in describe_held_out(unknown, policy_version=3)
    assert describe(unknown, **about, max_tokens=5)["batch/truncated"] == 0.5
    told = lazy_stack([row_of_agent(2, 9, cut=True), row_of_agent(3, 9, cut=True)])
    assert describe(told, **about)["batch/truncated"] == 1.0
    assert describe(told, **about, max_tokens=99)["batch/truncated"] == 1.0


def test_rows_are_described_by_the_key_of_their_prompts():
    rows = [row_of_agent(1, 1), row_of_agent(1, 1, reward=(torch.nan, 2.0))]
    said = describe_rows(lazy_stack(rows), "question")
    assert said.endswith("2 responses to 'Why?' (reward nan), 'Why?' (reward 1).")


def test_the_best_response_by_rewards_of_tokens():
    rows = [row_of_agent(1, 1), row_of_agent(1, 1, reward=(1.0, 2.0))]
    assert "(reward 3)" in sample_of(lazy_stack(rows), "question")

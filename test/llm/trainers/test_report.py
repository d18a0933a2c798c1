"""What a run tells at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_sglang.errors import CheckpointError
from torchrl_sglang.objectives.advantages import REWARD
from torchrl_sglang.trainers.report import Rollouts, summarize


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

"""A run records itself: on a real engine, compared with what it wrote besides."""

from __future__ import annotations

import json

import pytest
from helpers.log_probs import TOLERANCE
from helpers.small_runs import few_tokens

from torchrl_sglang import GRPO, RunRecorder
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.groups import conversations_of
from torchrl_sglang.viewer.page import page_data, read_runs, self_contained

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")


def run_of(model, engine, output, **arguments):
    return GRPO(
        model,
        prompts=[{"query": f"Say {number}."} for number in range(24)],
        rewards={"few": few_tokens},
        generate_kwargs={"max_new_tokens": 12},
        group_size=4,
        groups_per_batch=2,
        steps=2,
        lr=1e-3,
        engine=engine,
        output=output,
        **arguments,
    )


def test_a_run_shows_what_it_did(restored_engine, tiny_model_path, tmp_path):
    output = tmp_path / "run"
    run_of(tiny_model_path, restored_engine, output).train()
    recording = Recording.open(output)
    (run,) = read_runs([recording])
    assert run.name == "run"
    rows = [json.loads(each) for each in (output / "rollouts.jsonl").open()]
    assert sum(len(group.line.responses) for group in run.groups) == len(rows) == 16
    assert {group.status for group in run.groups} == {"trained"}
    assert sorted(reward for group in run.groups for reward in group.line.rewards) == (
        pytest.approx(sorted(row["reward"] for row in rows))
    )
    # The weights are sent before the first step, and after each.
    assert len(run.updates) == 3
    assert all(event["bytes"] > 0 for event in run.updates)
    assert {phase.name for phase in run.phases} >= {"wait", "train", "save"}
    assert set(run.metrics["train/loss"]) == {1, 2}
    assert run.engine
    texts = {row["response"] for row in rows}
    for group in run.groups:
        found = conversations_of(recording, group)
        for response in found["responses"]:
            (turn,) = response["turns"]
            assert "".join(turn["pieces"]) in texts
            # The trainer has the weights that the engine sampled with.
            assert len(turn["trainer"]) == len(turn["log_probs"]) == turn["count"]
            # Both have four digits.
            expected = pytest.approx(turn["log_probs"], abs=TOLERANCE, rel=1e-3)
            assert turn["trainer"] == expected
    titles = {curve["title"] for curve in page_data([run], now=0.0)["curves"]}
    assert {"Reward by function", "Weight updates", "Staleness"} <= titles
    assert len(self_contained([recording], now=0.0)) > 500_000


def test_a_run_that_is_not_to_be_recorded_is_not(
    restored_engine, tiny_model_path, tmp_path
):
    run_of(tiny_model_path, restored_engine, tmp_path / "run", recorder=False).train()
    assert not (tmp_path / "run" / "record").exists()


def test_a_wrong_recorder_is_refused(engine, tiny_model_path, tmp_path):
    with pytest.raises(ConfigurationError, match="a bool or a RunRecorder, got 'yes'"):
        run_of(tiny_model_path, engine, tmp_path / "run", recorder="yes")


def test_a_given_recorder_stays_open(restored_engine, tiny_model_path, tmp_path):
    with RunRecorder(tmp_path / "elsewhere") as recorder:
        made = run_of(
            tiny_model_path, restored_engine, tmp_path / "run", recorder=recorder
        )
        made.train()
        recorder.log({"mine": 1.0}, step=3)
    (run,) = read_runs([Recording.open(tmp_path / "elsewhere")])
    assert run.metrics["mine"] == {3: 1.0}

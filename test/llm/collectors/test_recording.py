"""Events of a collector, compared with the batches that it yields."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from helpers.collecting import OneReward, length_reward, one_turn_env

from torchrl_sglang import (
    GroupAdvantage,
    RunRecorder,
    batch_to_dataset,
    dataset_to_batch,
    load_rollouts,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.observer import GroupEnded, GroupsTaken
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.recording.records import row_key
from torchrl_sglang.viewer.page import read_runs


def keys_of(batch):
    return [row_key(row["tokens", "full"].numpy()) for row in batch.unbind(0)]


async def twice(conversation, task):
    return "Go on." if len(conversation.turns) < 2 else None


def test_groups_and_batches_are_those_of_the_collector(make, tmp_path):
    recorder = RunRecorder(tmp_path, poll_seconds=0.05)
    collector = make(
        recorder=recorder, group_size=2, total_groups=6, step=twice, max_turns=2
    )
    advantage, batches = GroupAdvantage(2, "centered"), []
    for step, batch in enumerate(collector):
        batches.append(advantage(batch))
        recorder.trained(batches[-1], step=step)
    collector.shutdown()
    recorder.close()
    assert recorder.lost == 0
    recording = Recording.open(tmp_path)
    (run,) = read_runs([recording])
    assert len(run.groups) == 6
    assert [phase.name for phase in run.phases] == ["wait"] * 4
    for number, batch in enumerate(batches, start=1):
        groups = [group for group in run.groups if group.batch == number]
        groups.sort(key=lambda group: group.line.position)
        keys = [key for g in groups for each in g.line.responses for key in each.keys]
        assert keys == keys_of(batch)
        rewards = [reward for group in groups for reward in group.line.rewards]
        returned = batch["next", "reward"].flatten()
        # Two turns of each conversation.
        assert rewards == pytest.approx(returned.view(-1, 2).sum(-1).tolist())
        told = [
            group.advantages[key]
            for group in groups
            for key in [k for each in group.line.responses for k in each.keys]
        ]
        assert told == pytest.approx(batch["advantage"].flatten().tolist())
        tokens = [len(each) for each in batch.get(("tokens", "response"), as_list=True)]
        counted = [each.tokens for group in groups for each in group.line.responses]
        assert sum(counted) == sum(tokens)
        assert all(group.status == "trained" for group in groups)
    # Nothing runs any more.
    assert sum(change for _, change in run.running) == 0
    assert run.collector or run.engine


def test_a_recording_becomes_the_dataset_of_its_batches(make, tmp_path):
    recorder = RunRecorder(tmp_path)
    collector = make(
        recorder=recorder,
        group_size=2,
        groups_per_batch=4,
        total_groups=4,
        step=twice,
        max_turns=2,
        rewards={"length": (length_reward, 0.5)},
    )
    (batch,) = collector
    expected = batch_to_dataset(batch)
    collector.shutdown()
    recorder.close()
    recorded = load_rollouts(tmp_path)
    assert isinstance(recorded, Dataset)
    dataset = recorded.select(np.argsort(recorded["position"], kind="stable"))
    assert len(dataset) == len(expected) == 16
    for name in (
        *("prompt", "completion", "prompt_ids", "completion_ids", "env_mask"),
        *("logprobs", "reward", "reward.length", "done", "terminated", "truncated"),
        "policy_version",
    ):
        assert dataset.features[name] == expected.features[name], name
        assert dataset[name] == expected[name], name
    assert dataset["weight_versions"] == expected["token_policy_version"]
    assert len(set(dataset["group"])) == 4
    batch = dataset_to_batch(dataset)
    assert [row_key(row["tokens", "full"].numpy()) for row in batch] == keys_of(batch)


def test_rows_of_environments_have_their_tokens(make, tmp_path):
    recorder = RunRecorder(tmp_path)
    collector = make(
        recorder=recorder,
        env=lambda: one_turn_env(OneReward()),
        rewards=None,
        group_size=2,
        groups_per_batch=4,
        total_groups=4,
    )
    (batch,) = collector
    expected = batch_to_dataset(batch)
    collector.shutdown()
    recorder.close()
    recorded = load_rollouts(tmp_path)
    dataset = recorded.select(np.argsort(recorded["position"], kind="stable"))
    for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward"):
        assert dataset[name] == expected[name], name
    for row in dataset:
        assert isinstance(row["prompt"], str)
        assert row["done"]


def test_rows_with_other_tokens_are_left_out_and_counted(make, tmp_path, caplog):
    recorder = RunRecorder(tmp_path)
    for _ in make(recorder=recorder, total_groups=4):
        pass
    recorder.close()
    (path,) = tmp_path.glob("texts-*")
    content = path.read_bytes()
    place = content.index(b'"pieces":["') + len(b'"pieces":["')
    edited = b"B" if content[place : place + 1] == b"A" else b"A"
    path.write_bytes(content[:place] + edited + content[place + 1 :])
    assert len(load_rollouts(tmp_path)) == 3
    assert "1 of 4 groups" in caplog.text


def test_a_group_that_fails_is_recorded(make, tmp_path):
    def reward(conversation, task):
        if task["query"].endswith("3"):
            raise RuntimeError("an odd prompt")
        return 1.0

    recorder = RunRecorder(tmp_path)
    collector = make(
        recorder=recorder,
        rewards=reward,
        max_retries=0,
        total_groups=6,
        prompts=[{"query": f"Say {number}"} for number in range(8)],
    )
    for _ in collector:
        pass
    collector.shutdown()
    recorder.close()
    (run,) = read_runs([Recording.open(tmp_path)])
    assert len(run.failures) == 1
    assert "an odd prompt" in run.failures[0]


def test_a_group_that_is_filtered_out_is_not_trained(make, tmp_path):
    recorder = RunRecorder(tmp_path)
    kept = iter([False, True] * 20)
    collector = make(
        recorder=recorder,
        keep_group=lambda returns: next(kept),
        total_groups=2,
        max_in_flight=1,
    )
    for _ in collector:
        pass
    collector.shutdown()
    recorder.close()
    (run,) = read_runs([Recording.open(tmp_path)])
    states = [group.status for group in run.groups]
    assert states.count("taken") == 2
    assert states.count("filtered") >= 1


def test_a_function_subscribes_and_its_errors_do_not_end_the_run(make, caplog):
    events = []

    def subscribe(event):
        events.append(event)
        raise RuntimeError("a mistake")

    collector = make(recorder=subscribe, total_groups=4)
    batches = list(collector)
    collector.shutdown()
    ended = {each.group.id: each for each in events if isinstance(each, GroupEnded)}
    assert {event.group.position for event in ended.values()} == {0, 1, 2, 3}
    # Groups may end in another order than they began.
    taken = [
        group
        for each in events
        if isinstance(each, GroupsTaken)
        for group in each.groups
    ]
    assert sorted(group.id for group in taken) == sorted(ended)
    keys = [
        row_key([token for part in row.tokens for token in part])
        for group in taken
        for response in ended[group.id].responses()
        for row in response.rows
    ]
    assert keys == [key for batch in batches for key in keys_of(batch)]
    (warning,) = [text for text in caplog.messages if "a mistake" in text]
    assert "raised RuntimeError('a mistake') on CollectorStarted" in warning


def test_a_recorder_that_is_none_is_refused(make):
    with pytest.raises(ConfigurationError, match="recorder must be a RunRecorder"):
        make(recorder="runs/x")

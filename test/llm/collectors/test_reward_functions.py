"""Reward functions with weights, and those that were written for TRL and verl."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.collecting import tasks

from torchrl_sglang.errors import CollectionError, ConfigurationError


def take(collector):
    (batch,) = list(collector)
    return {
        name: batch["next", name].flatten().tolist()
        for name in ("reward", "a", "b")
        if ("next", name) in batch.keys(True)
    }


def one_batch(make, rewards, **arguments):
    given = {
        "prompts": tasks(2),
        "group_size": 3,
        "total_groups": 2,
        "groups_per_batch": 2,
        "max_retries": 0,
    }
    return make(rewards=rewards, **{**given, **arguments})


def test_weights(make):
    rewards = {
        "a": (lambda conversation, task: float(task["answer"]), 0.5),
        "b": lambda conversation, task: 2.0,
    }
    found = take(one_batch(make, rewards))
    assert sorted(found["a"]) == [0.0] * 3 + [1.0] * 3
    assert found["b"] == [2.0] * 6
    expected = [0.5 * a + b for a, b in zip(found["a"], found["b"], strict=True)]
    assert found["reward"] == expected


@pytest.mark.parametrize("weight", ["1", None, float("nan"), True])
def test_weights_that_are_no_numbers(make, weight):
    with pytest.raises(ConfigurationError, match="the weight of 'a' must be"):
        make(rewards={"a": (lambda conversation, task: 1.0, weight)})


@pytest.mark.parametrize("kind", ["function", "coroutine", "narrow", "part", "ids"])
def test_trl(make, kind):
    """Columns as lists, texts for a text, and a value for each completion."""
    seen = []

    def score(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, columns))
        return [float(len(text)) for text in completions]

    async def waits(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    def narrow(completions, answer):
        assert set(map(str, answer)) in ({"0"}, {"1"})
        return [float(len(text)) for text in completions]

    def part(completions, **columns):
        return [None, *(float(len(text)) for text in completions[1:])]

    def ids(completion_ids):
        return [float(len(each)) for each in completion_ids]

    chosen = {"function": score, "coroutine": waits, "narrow": narrow, "part": part}
    found = take(one_batch(make, {"a": {**chosen, "ids": ids}[kind]}))
    assert found["a"] == found["reward"]
    assert all(value > 0 for value in found["a"]) is (kind != "part")
    for prompts, completions, ids, columns in seen:
        assert len({len(completions), len(ids), len(prompts), 3}) == 1
        assert all(isinstance(each, str) for each in (*prompts, *completions))
        assert columns["answer"] == columns["answer"][:1] * 3


def test_trl_with_messages(make):
    def score(prompts, completions, **columns):
        assert [each["role"] for each in prompts[0]] == ["system", "user"]
        assert [each[0]["role"] for each in completions] == ["assistant"] * 3
        return torch.ones(3)

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say it."},
    ]
    prompts = [{"query": messages, "answer": "it"}] * 2
    assert take(one_batch(make, score, prompts=prompts))["reward"] == [1.0] * 6


def test_a_column_that_trl_would_have(make):
    def score(completions, solution):
        return [1.0] * len(completions)

    with pytest.raises(CollectionError, match="TRL's signature .*'solution'"):
        take(one_batch(make, score))


@pytest.mark.parametrize("answer", ["number", "mapping", "coroutine"])
def test_verl(make, answer):
    def score(data_source, solution_str, ground_truth, extra_info=None):
        assert isinstance(solution_str, str)
        assert extra_info == {"level": 1}
        value = float(ground_truth) + (data_source == "made up")
        return {"score": value, "length": 3} if answer == "mapping" else value

    async def waits(**given):
        return score(**given)

    async def solution(solution_str, **given):
        return await waits(solution_str=solution_str, **given)

    prompts = [
        {
            "query": "Say 1.",
            "data_source": "made up",
            "reward_model": {"ground_truth": "1", "style": "rule"},
            "extra_info": {"level": 1},
        }
    ] * 2
    function = solution if answer == "coroutine" else score
    found = take(one_batch(make, {"a": function}, prompts=prompts))
    assert found["reward"] == [2.0] * 6


def test_verl_without_a_ground_truth(make):
    def score(data_source, solution_str, ground_truth):
        return 1.0

    with pytest.raises(CollectionError, match="verl's signature .*ground_truth"):
        take(one_batch(make, score))


def test_arguments_of_trl_s_trainer(make):
    def logs(completions, log_metric, **columns):
        return [1.0] * len(completions)

    def may_log(completions, trainer_state=None, log_metric=None, log_extra=None):
        return [1.0] * len(completions)

    with pytest.raises(ConfigurationError, match="requires log_metric, .*log_metric="):
        make(rewards=logs)
    assert take(one_batch(make, may_log))["reward"] == [1.0] * 6


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda completion, answer, **kwargs: 1.0, "completion"),
        (lambda prompt, completion: 1.0, "prompt"),
        (lambda response, ground_truth: 1.0, "response"),
        (lambda conversation, answer: 1.0, "answer"),
        (partial(lambda scale, completion, answer: 1.0, 2.0), "completion"),
    ],
)
@pytest.mark.parametrize("argument", ["rewards", "group_rewards"])
def test_parameters_of_other_libraries(make, function, name, argument):
    """They would get the conversation and the task, and compare these as texts."""
    with pytest.raises(ConfigurationError, match=f"parameter {name!r} is a text"):
        make(**{argument: function})

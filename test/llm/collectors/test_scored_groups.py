"""Groups whose rows get further columns while others are generated."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.collecting import length_reward, tasks

from torchrl_sglang import has_variance
from torchrl_sglang.errors import (
    CollectionError,
    ConfigurationError,
    ServerUnavailableError,
    UserFunctionError,
)

SECONDS = 30.0


def numbered(rows):
    """Returns rows with the number of their tokens."""
    for row in rows.unbind(0):
        row.set("length", torch.tensor(len(row["tokens", "full"])))
    return rows


def test_rows_have_the_columns(make):
    collector = make(score=numbered, group_size=2, total_groups=4)
    for batch in collector:
        for row in batch.unbind(0):
            assert int(row["length"]) == len(row["tokens", "full"])


def test_other_groups_are_generated_meanwhile(make):
    """The first group is scored only when another one is generated."""
    others, waited = threading.Event(), []

    def reward(conversation, task):
        if task["answer"] != "0":
            others.set()
        return length_reward(conversation, task)

    def score(rows):
        waited.append(others.wait(SECONDS))
        return rows

    list(make(rewards=reward, score=score, total_groups=2, max_in_flight=1))
    assert waited == [True, True]


def test_groups_that_are_dropped_are_not_scored(make):
    asked = []

    def score(rows):
        asked.extend(rows["answer"])
        return rows

    collector = make(
        prompts=tasks(8),
        rewards=lambda talk, task: float(talk.sample) * (int(task["answer"]) % 2),
        group_size=2,
        total_groups=2,
        keep_group=has_variance,
        score=score,
    )
    list(collector)
    assert asked
    assert all(int(answer) % 2 for answer in asked)


def test_a_group_that_cannot_be_scored_is_given_up_at_once(make):
    asked = []

    def score(rows):
        asked.append(rows["answer"][0])
        if asked[-1] == "1":
            raise ConfigurationError("It is too long.")
        return rows

    collector = make(prompts=tasks(4), score=score, groups_per_batch=1, total_groups=3)
    found = {answer for batch in collector for answer in batch["answer"]}
    assert "1" not in found
    assert asked.count("1") == 1
    message = "Its rows cannot be scored: It is too long."
    assert message in collector.stats()["errors"][0]


def test_a_scorer_whose_servers_are_gone_ends_the_collector(make):
    def score(rows):
        raise ServerUnavailableError("Nobody answers.")

    with pytest.raises(
        CollectionError, match="nobody scores .* Nobody answers"
    ) as raised:
        list(make(score=score))
    assert isinstance(raised.value.__cause__, ServerUnavailableError)


@pytest.mark.parametrize("wrong", [lambda rows: None, lambda rows: rows[:0]])
def test_results_that_are_not_the_rows(make, wrong):
    with pytest.raises(CollectionError, match="return the rows") as raised:
        list(make(score=wrong))
    assert isinstance(raised.value.__cause__, UserFunctionError)


@pytest.mark.parametrize(
    ("score", "message"), [(3, "a function of a group's rows"), (lambda: 1, "rows")]
)
def test_what_is_no_function_of_rows(make, score, message):
    with pytest.raises(ConfigurationError, match=message):
        make(score=score)

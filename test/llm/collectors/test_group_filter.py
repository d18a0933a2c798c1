"""Groups that are not trained on: others take their place, and somebody is told."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from helpers.collecting import tasks

from torchrl_sglang import has_variance
from torchrl_sglang.errors import CollectionError, ConfigurationError


def by_sample(conversation, task):
    """Differs in a group of every second prompt."""
    return float(conversation.sample) * (int(task["answer"]) % 2)


def test_groups_without_variance_are_replaced(make):
    collector = make(
        prompts=tasks(8),
        rewards=by_sample,
        group_size=2,
        total_groups=4,
        keep_group=has_variance,
    )
    answers = [int(a) for batch in collector for a in batch["answer"]]
    assert len(answers) == 8
    assert all(answer % 2 for answer in answers)
    stats = collector.stats()
    assert stats["groups_filtered"] >= 3
    assert stats["groups_failed"] == stats["groups_retried"] == 0


def test_nothing_left_to_train_on(make):
    collector = make(
        prompts=tasks(8),
        rewards=lambda conversation, task: 1.0,
        group_size=2,
        keep_group=has_variance,
    )
    with pytest.raises(CollectionError, match="kept none of 20 complete groups"):
        list(collector)


def test_prompts_that_end_while_groups_are_dropped(make):
    collector = make(
        prompts=iter(tasks(6)), rewards=by_sample, group_size=2, keep_group=has_variance
    )
    assert sum(len(batch) for batch in collector) == 6


async def waits(returns):
    await asyncio.sleep(0)
    return has_variance(returns)


class Waits:
    async def __call__(self, returns):
        return await waits(returns)


@pytest.mark.parametrize(
    "keep_group",
    [
        *(waits, Waits(), partial(waits), lambda returns: waits(tuple(returns))),
        *(np.ptp, lambda returns: torch.tensor(has_variance(returns))),
    ],
)
def test_filters_of_every_kind_decide(make, keep_group):
    collector = make(
        prompts=tasks(8),
        rewards=by_sample,
        group_size=2,
        total_groups=2,
        keep_group=keep_group,
    )
    answers = [int(a) for batch in collector for a in batch["answer"]]
    assert len(answers) == 4
    assert all(answer % 2 for answer in answers)


async def fails(returns):
    raise KeyError("threshold")


@pytest.mark.parametrize(
    ("keep_group", "message"),
    [
        (lambda returns: {}["threshold"], "keep_group raised KeyError"),
        (lambda returns: None, "keep_group returned None; return True"),
        (lambda returns: "no", "returned 'no'; return True"),
        (lambda returns: [False], r"returned \[False\]; return True"),
        (fails, "keep_group raised KeyError"),
    ],
)
def test_filters_that_decide_nothing(make, keep_group, message):
    collector = make(keep_group=keep_group, max_retries=0)
    with pytest.raises(CollectionError, match=message):
        list(collector)


@pytest.mark.parametrize("given", [1, "has_variance", lambda: True])
def test_no_filter(make, given):
    with pytest.raises(ConfigurationError, match="keep_group"):
        make(keep_group=given)

"""Collectors that have ended do not stand in the way of the next one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.collecting import tasks
from transformers import PreTrainedModel

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    RayAsyncLLMCollector,
    SGLangWeightSyncScheme,
)
from torchrl_sglang.errors import CollectionError


@pytest.fixture
def scheme(
    fake_engine: AsyncSGLang, hf_model: PreTrainedModel, tmp_path: Path
) -> Iterator[SGLangWeightSyncScheme]:
    scheme = SGLangWeightSyncScheme(
        fake_engine, transport="disk", directory=str(tmp_path)
    )
    scheme.create_sender().register_model(hf_model)
    yield scheme
    scheme.shutdown()


@pytest.fixture(params=["here", pytest.param("ray", marks=pytest.mark.slow)])
def start(request, policy, scheme):
    """Makes collectors of one scheme, on this machine or in actors."""
    kind = AsyncLLMCollector
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("ray_here")
        kind = RayAsyncLLMCollector
    made = weakref.WeakSet()

    def start_collector(**kwargs):
        collector = kind(
            policy=policy,
            prompts=tasks(50),
            groups_per_batch=1,
            weight_sync_schemes={"policy": scheme},
            **kwargs,
        )
        made.add(collector)
        return collector

    yield start_collector
    for collector in made:
        collector.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own, about futures and processes.
def test_the_next_collector_updates(start, scheme, caplog):
    sender = scheme.create_sender()
    failed = start(rewards=lambda conversation, task: 1 / 0, max_retries=0)
    failed.update_policy_weights_()
    with pytest.raises(CollectionError):
        next(iter(failed))
    version = sender.last_report.version
    with pytest.raises(CollectionError, match="division by zero"):
        failed.update_policy_weights_()
    # Its own trainer is told, and nothing was sent.
    assert sender.last_report.version == version
    collector = start(rewards=lambda conversation, task: 1.0)
    check_updates(collector)
    warned = [each for each in caplog.messages if "has ended and counts no" in each]
    assert len(warned) == 1
    # shutdown() unregisters, also twice.
    report = collector.last_sync_report
    collector.shutdown()
    collector.shutdown()
    assert int(sender.update_weights().version) > int(report.version)
    assert collector.last_sync_report is report


@pytest.mark.parametrize("start", ["here"], indirect=True)
def test_collectors_that_are_gone_count_nothing(start, caplog):
    """Of one that was shut down, and of one that was dropped, nothing is left."""
    stopped = start(rewards=lambda conversation, task: 1.0)
    stopped.shutdown()
    dropped = weakref.ref(start(rewards=lambda conversation, task: 1.0))
    gc.collect()
    assert dropped() is None
    check_updates(start(rewards=lambda conversation, task: 1.0))
    assert not [each for each in caplog.messages if "has ended" in each]


def check_updates(collector):
    before = collector.policy_version
    for count in (1, 2, 3):
        report = collector.update_policy_weights_()
        assert collector.policy_version == before + count
        assert collector.last_sync_report is report


def test_a_collector_that_was_shut_down_sends_nothing(start, scheme):
    collector = start()
    report = collector.update_policy_weights_()
    collector.shutdown()
    with pytest.raises(CollectionError, match="was shut down, and sends no weights"):
        collector.update_policy_weights_()
    assert scheme.create_sender().last_report is report

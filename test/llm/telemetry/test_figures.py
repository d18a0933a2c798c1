"""Figures of a step: what happened since the last one, counted by hand beside it."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import pytest
from helpers.collecting import length_reward, tasks

from torchrl_sglang import (
    AsyncLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    StepFigures,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.telemetry.figures import (
    collector_figures,
    engine_figures,
    gateway_figures,
)


def test_steps_of_a_run(restored_engine, hf_model):
    policy = SGLangWrapper(
        restored_engine,
        input_mode="history",
        generate_kwargs={"max_new_tokens": 6},
        return_log_probs=True,
    )
    scheme = SGLangWeightSyncScheme(restored_engine, hf_model)
    with AsyncLLMCollector(
        policy=policy,
        prompts=tasks(8),
        rewards=length_reward,
        group_size=2,
        groups_per_batch=2,
        max_staleness=0,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        figures = StepFigures(
            engine=restored_engine, collector=collector, scheme=scheme, timeout=60.0
        )
        report = collector.update_policy_weights_()
        batches = iter(collector)
        next(batches)
        first = figures.read()
        batch = next(batches)
        second = figures.read()
    scheme.shutdown()
    lengths = [len(row) for row in batch.get(("tokens", "response"), as_list=True)]
    assert first["weights/updates"] == 1
    assert first["weights/seconds"] == report.seconds
    assert first["weights/bytes"] == report.num_bytes
    assert first["weights/version"] == float(report.version)
    assert first["weights/send_seconds"] == report.phase_seconds["send"]
    # There was none since.
    assert second["weights/updates"] == 0
    assert "weights/seconds" not in second
    assert second["engine/responses"] == len(lengths)
    assert second["engine/servers"] == second["engine/servers_serving"] == 1
    assert second["engine/request_seconds_mean"] > 0
    assert 0 <= second["engine/cache_hit_rate"] <= 1
    assert second["staleness/tokens_mean"] == second["staleness/tokens_max"] == 0
    assert second["rollout/group_seconds_mean"] > 0
    # Responses over time, by two counters that do not know of each other.
    ratio = second["engine/tokens_per_second"] / second["rollout/tokens_per_second"]
    assert ratio == pytest.approx(1.0, abs=0.2)
    assert all(math.isfinite(value) for value in (first | second).values())
    assert all(type(value) is float for value in (first | second).values())


COLLECTOR: dict[str, Any] = {
    "tokens": 100,
    "groups_running": 2,
    "groups_ready": 1,
    "groups_stale": 1,
    "groups_retried": 0,
    "groups_failed": 0,
    "groups_filtered": 3,
    "group_seconds": None,
    "lately": {
        "trainer_waits": 0.5,
        "engine_idle": 0.25,
        "conversations": 3.0,
        "conversations_in_flight": 2.0,
    },
    "age": {0: 50, 2: 10},
    "age_in_flight": {0: 60},
    "age_in_queue": {0: 50, 2: 10},
}


def test_ages_are_those_of_the_step_alone(engine):
    seconds = engine.stats().request_seconds
    before = {**COLLECTOR, "group_seconds": seconds}
    now = {
        **before,
        "tokens": 160,
        "groups_stale": 5,
        "age": {0: 50, 1: 30, 2: 40},
        "age_in_flight": {0: 90, 1: 30},
        "age_in_queue": {0: 80, 2: 40},
    }
    found = dict(collector_figures(now, before, 2.0))
    assert found["rollout/tokens_per_second"] == 30
    assert found["rollout/groups_stale"] == 4
    assert found["rollout/groups_filtered"] == 0
    # 30 tokens of age 1 and 30 of age 2.
    assert found["staleness/tokens_mean"] == 1.5
    assert found["staleness/tokens_max"] == 2
    assert found["staleness/in_flight_mean"] == 0.5
    assert found["staleness/in_queue_mean"] == 1.0
    # Those of an age that was counted before are none of this step.
    unchanged = dict(collector_figures(now, now, 2.0))
    assert "staleness/tokens_mean" not in unchanged


def test_servers_are_added_up_and_those_without_an_answer_left_out(engine):
    stats = engine.stats()
    (server,) = stats.servers
    servers = (
        dataclasses.replace(server, running=3, queued=2, cache_usage=0.5),
        dataclasses.replace(server, running=4, queued=0, cache_usage=0.75),
        dataclasses.replace(
            server, state="down", running=None, queued=None, cache_usage=None
        ),
    )
    now = dataclasses.replace(
        stats, servers=servers, response_tokens=stats.response_tokens + 50
    )
    found = dict(engine_figures(now, stats, 2.0))
    assert found["engine/running"] == 7
    assert found["engine/queued"] == 2
    assert found["engine/cache_usage"] == 0.75
    assert found["engine/servers"] == 3
    assert found["engine/servers_serving"] == 2
    assert found["engine/tokens_per_second"] == 25
    assert found["engine/cache_hit_rate"] is None


def test_branches_of_a_gateway():
    before = {"sessions": 1, "generating": 0, "turns": 2, "tokens": 10, "branches": {}}
    now = {**before, "turns": 4, "tokens": 40, "branches": {"edited": 3}}
    found = dict(gateway_figures(now, before, 1.0))
    assert found["gateway/turns"] == 2
    assert found["gateway/tokens_per_turn"] == 15
    assert found["gateway/branches_edited"] == 3


def test_a_part_that_hangs_or_fails_is_left_out_and_reported_later(engine):
    released = threading.Event()

    class Slow:
        turns = 5

        def stats(self) -> Any:
            assert released.wait(60)
            return {
                "sessions": 1,
                "generating": 0,
                "turns": self.turns,
                "tokens": 9,
                "branches": {},
            }

    class Broken:
        def stats(self) -> Any:
            return {"tokens": 1}

    slow, broken = Slow(), Broken()
    figures = StepFigures(gateway=slow, collector=broken, timeout=0.05)
    assert figures.read() == {}
    released.set()
    patient = StepFigures(gateway=slow, engine=engine, timeout=60.0)
    slow.turns += 3
    assert patient.read()["gateway/turns"] == 3


def test_work_before_the_first_reading_is_not_counted(fake_engine):
    def generate(count: int) -> None:
        fake_engine.generate(
            input_ids=[[5, 6]] * count, sampling_params={"max_new_tokens": 4}
        )

    generate(5)
    figures = StepFigures(engine=fake_engine, timeout=60.0)
    generate(2)
    assert figures.read()["engine/responses"] == 2
    generate(1)
    assert figures.read()["engine/responses"] == 1


def test_a_part_that_was_slow_at_first_is_counted_from_its_first_answer():
    class Late:
        turns = 5

        def stats(self) -> Any:
            if self.turns == 5:
                raise ConnectionError("not yet")
            counts = {"generating": 0, "turns": self.turns, "tokens": 9}
            return {"sessions": 1, "branches": {}, **counts}

    late = Late()
    figures = StepFigures(gateway=late)
    late.turns = 7
    assert figures.read() == {}
    late.turns = 8
    assert figures.read()["gateway/turns"] == 1


def test_nothing_to_read_and_no_statistics():
    with pytest.raises(ConfigurationError, match="nothing to read"):
        StepFigures()
    with pytest.raises(ConfigurationError, match="has no statistics"):
        StepFigures(collector=[])

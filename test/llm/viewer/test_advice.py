"""What is said to bound a run, of runs that somebody would say it of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.recorded_runs import write_run

from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.advice import LEAST_ANSWERS, Figures, advise, figures_of
from torchrl_sglang.viewer.page import read_runs
from torchrl_sglang.viewer.timeline import lanes

BALANCED = Figures(
    waiting=0.05,
    training=0.85,
    sending=0.05,
    saving=0.05,
    idle=0.1,
    queued=0.0,
    environment=False,
    max_staleness=1,
)


@pytest.mark.parametrize(
    ("change", "bound", "remedy"),
    [
        ({}, "Training bounds", "max_tokens_per_pass"),
        ({"idle": 0.8, "servers": 2}, "Training bounds", "fewer servers would do"),
        (
            {"waiting": 0.8, "training": 0.1, "queued": 2.0},
            "Generation bounds",
            "num_replicas",
        ),
        ({"waiting": 0.8, "training": 0.1}, "Generation bounds", "max_in_flight"),
        (
            {"waiting": 0.5, "training": 0.4, "idle": 0.5, "max_staleness": 0},
            "take turns",
            "max_staleness=1",
        ),
        (
            {"waiting": 0.5, "training": 0.4, "idle": 0.5},
            "bound on staleness",
            "Raise max_staleness",
        ),
        ({"waiting": 0.6, "environment": True}, "The environment", "num_threads"),
        (
            {"sending": 0.9, "training": 0.1},
            "Weight updates",
            "or larger batches (groups_per_batch)",
        ),
        ({"saving": 0.9, "training": 0.1}, "checkpoints bound", "checkpoint_every"),
        ({"waiting": 0.6, "down": "http://a"}, "do not serve", "logs"),
    ],
)
def test_what_bounds_a_run(change, bound, remedy):
    said = advise(replace(BALANCED, **change))
    assert bound in said
    assert remedy in said


def test_a_run_with_one_server_needs_it():
    assert "fewer" not in advise(replace(BALANCED, idle=0.8))


def test_nothing_is_said_of_what_is_not_known():
    assert "not known yet" in advise(None)


@pytest.mark.parametrize(("steps", "known"), [(2, False), (8, True)])
def test_few_answers_of_servers_do_not_tell_how_idle_they_are(tmp_path, steps, known):
    """Each is of a moment: three of them may all be of weight updates."""
    write_run(tmp_path, steps=steps)
    (data,) = read_runs([Recording.open(tmp_path)])
    assert (len(data.engine) >= LEAST_ANSWERS) == known
    found = figures_of(data, lanes(data))
    assert (found.idle is not None) == known
    assert found.servers == 2
    said = advise(replace(BALANCED, idle=found.idle, servers=found.servers))
    assert ("fewer servers" in said, "do not generate" in said) == (known, known)


def test_a_loop_without_phases_gets_advice_how_to_report_them():
    quiet = replace(BALANCED, waiting=0.12, training=0.0, sending=0.05, saving=0.0)
    said = advise(quiet)
    assert "83% of the time is in no phase" in said
    assert "recorder.phase('train')" in said
    # A fourth of the time is not worth more than what takes the most.
    assert "Training bounds" in advise(replace(BALANCED, training=0.6))

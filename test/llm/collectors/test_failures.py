"""What becomes of groups that failed, by the errors and the time."""

from __future__ import annotations

import pytest

from torchrl_sglang.collectors.scheduling.failures import (
    BACKOFF_SECONDS,
    MOST_FAILURES,
    GroupFailures,
)
from torchrl_sglang.errors import (
    ChatTemplateError,
    GenerationAbortedError,
    NotFiniteError,
    RequestRefusedError,
    ServerUnavailableError,
    TaskError,
    UserFunctionError,
    WeightSyncStateError,
)

ENGINE = ServerUnavailableError("gone")


@pytest.fixture
def failures():
    return GroupFailures(max_retries=2, engine_seconds=600.0)


def caused_by(error: Exception) -> UserFunctionError:
    raised = UserFunctionError("the reward failed")
    raised.__cause__ = error
    return raised


def test_a_group_s_own_failures_are_borne_so_many_times(failures):
    verdicts = [failures.failed(0, KeyError("answer"), now=0.0) for _ in range(3)]
    assert [each.retry for each in verdicts] == [True, True, False]
    assert [each.attempts for each in verdicts] == [1, 2, 3]
    assert not any(each.ends or each.engine_began for each in verdicts)
    assert failures.not_before == 0.0


REFUSAL = ChatTemplateError("roles")


@pytest.mark.parametrize("error", [REFUSAL, caused_by(REFUSAL)])
def test_a_template_that_refuses_a_later_turn_ends_a_collection(failures, error):
    verdict = failures.failed(7, error, now=0.0)
    assert (verdict.retry, verdict.ends, verdict.attempts) == (False, True, 1)
    assert "prompt 7" in verdict.why


@pytest.mark.parametrize(
    "error",
    [
        ENGINE,
        GenerationAbortedError("aborted"),
        WeightSyncStateError("asleep"),
        # A judge of the user's own.
        caused_by(ENGINE),
    ],
)
def test_an_engine_is_borne_for_a_time(failures, error):
    verdicts = [failures.failed(0, error, now=100.0 * i) for i in range(7)]
    assert all(each.retry for each in verdicts)
    assert [each.engine_began for each in verdicts] == [True] + [False] * 6
    assert failures.not_before == 600.0 + BACKOFF_SECONDS
    # It alone fails: the group is at fault.
    last = failures.failed(0, error, now=601.0)
    assert not last.retry
    assert not last.ends


@pytest.mark.parametrize(
    "error",
    [NotFiniteError("NaN"), RequestRefusedError("too long"), caused_by(KeyError())],
)
def test_refused_requests_are_failures_of_their_group(failures, error):
    assert failures.failed(0, error, now=0.0).retry
    assert not failures.failed(0, error, now=0.0).engine_began
    assert not failures.failed(0, error, now=0.0).retry


def test_a_wrong_task_is_not_tried_again(failures):
    assert not failures.failed(0, TaskError("no prompt"), now=0.0).retry


def test_an_engine_that_fails_all_ends_the_collection(failures):
    for position in (0, 1):
        for _ in range(3):
            assert failures.failed(position, ENGINE, now=0.0).retry
    last = failures.failed(1, ENGINE, now=601.0)
    # Its prompt is not done.
    assert last.retry
    assert last.ends
    assert not last.why


def test_an_engine_that_answers_between_is_not_at_fault(failures):
    for position in (0, 1):
        for _ in range(3):
            failures.failed(position, ENGINE, now=0.0)
    failures.complete(2)
    last = failures.failed(1, ENGINE, now=601.0)
    assert not last.retry
    assert not last.ends


@pytest.mark.parametrize("one_is_complete", [False, True])
def test_groups_that_are_given_up_in_a_row(failures, one_is_complete):
    error = TaskError("no prompt")
    for position in range(MOST_FAILURES - 1):
        assert not failures.failed(position, error, now=0.0).ends
    if one_is_complete:
        failures.complete(100)
    last = failures.failed(50, error, now=0.0)
    assert not last.retry
    assert last.ends is not one_is_complete
    assert one_is_complete or f"{MOST_FAILURES} groups in a row" in last.why


def test_a_group_that_was_complete_begins_anew(failures):
    for _ in range(2):
        failures.failed(0, KeyError(), now=0.0)
    failures.complete(0)
    assert failures.failed(0, KeyError(), now=0.0).attempts == 1

"""Versions and consistency of the weights, without servers."""

from __future__ import annotations

import pickle

import pytest

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.weights_state import (
    ServedWeights,
    next_version,
    version_order,
)


def test_an_abort_restores_what_was_known_before():
    fleet = Fleet([])
    with fleet.weight_update() as first:
        first.mark_inconsistent("Half of them came.")
    assert not first.was_inconsistent
    with fleet.weight_update() as second:
        second.mark_inconsistent("The other half came.")
        second.abort()
    assert second.was_inconsistent
    assert fleet.weights.inconsistent == "Half of them came."
    assert fleet.weights.version == "default"


def test_what_an_update_did_is_known_of_its_version():
    fleet = Fleet([])
    with fleet.weight_update() as update:
        update.keeps_requests()
        update.commit("1")
    with fleet.weight_update() as update:
        update.aborts_requests()
        update.flushed()
        update.commit("2", checkpoint=True)
    now = fleet.weights
    assert (now.in_place_versions, now.clean_versions) == ({"1"}, {"2"})
    assert (now.abort_epoch, now.checkpoint_version) == (1, "2")
    twin = pickle.loads(pickle.dumps(fleet))
    assert (twin.weights.version, twin.weights.abort_epoch) == ("2", 0)


def test_a_newer_version_that_a_server_reports_is_taken_over():
    weights = ServedWeights.reported("5")
    assert weights.checkpoint_version is None
    assert weights.observe("default") is weights.observe("5") is weights
    weights = weights.observe("10")
    assert (weights.version, weights.newest) == ("10", "10")
    weights = weights.reserve("12").reserve("11")
    assert (weights.version, weights.newest) == ("10", "12")


@pytest.mark.parametrize(
    ("versions", "newest", "following"),
    [(["default"], "default", "1"), (["9", "10"], "10", "11"), (["0"], "0", "1")],
)
def test_versions_are_ordered_as_numbers(versions, newest, following):
    assert max(versions, key=version_order) == newest
    assert next_version(versions) == following

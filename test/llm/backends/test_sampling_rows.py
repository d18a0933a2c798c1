"""A row of the table of sampling parameters is all that a parameter needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import (
    SAMPLING_PARAMETERS,
    SamplingParameter,
    check_sampling_params,
)
from torchrl_sglang.trainers.sampling import check_sampling

FILTER = SamplingParameter(
    (float,), least=0.0, greatest=1.0, keeps_all=lambda value, _: value == 1
)


@pytest.fixture(autouse=True)
def a_filter(monkeypatch):
    """A parameter that leaves tokens out, as a developer adds one."""
    monkeypatch.setitem(SAMPLING_PARAMETERS, "made_up", FILTER)


@pytest.mark.parametrize("value", [0.5, 1.0])
@pytest.mark.parametrize("of_server", [False, True])
def test_behaviour_asks_for_what_a_filter_left(capabilities, value, of_server):
    params = {"made_up": value}
    if of_server:
        capabilities = replace(capabilities, default_sampling_params=params)
        params = {}
    request = GenerateRequest(input_ids=[1], sampling_params=params)
    filtered = value < 1
    plan = plan_request(request, capabilities)
    assert plan.token_filter == ("made_up" if filtered else "")
    request = replace(request, logprobs_mode="behaviour")
    if filtered:
        with pytest.raises(UnsupportedByServerError, match="made_up=0.5"):
            plan_request(request, capabilities)
    else:
        plan_request(request, capabilities)


def test_training_without_its_support_warns(capabilities):
    with pytest.warns(RuntimeWarning, match="made_up=0.5"):
        check_sampling({"made_up": 0.5}, "model", capabilities)
    check_sampling({"made_up": 1.0}, "model", capabilities)


def test_servers_that_draft_do_not_apply_it(capabilities):
    capabilities = replace(capabilities, speculates=True)
    with pytest.raises(UnsupportedByServerError, match="made_up=0.5 would be ignored"):
        check_sampling_params({"made_up": 0.5}, capabilities)
    check_sampling_params({"made_up": 1.0}, capabilities)

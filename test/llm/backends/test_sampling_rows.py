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


NO_FILTERS = """
    ebnf frequency_penalty ignore_eos json_schema logit_bias
    max_new_tokens min_new_tokens no_stop_trim presence_penalty regex
    repetition_penalty sampling_seed skip_special_tokens
    spaces_between_special_tokens stop stop_regex stop_token_ids
    structural_tag temperature
"""
"""Parameters that leave no token out of the distribution, or whose tokens a grammar
decides: a new parameter is put here, or its row says with ``keeps_all`` when it is off.
"""


def test_each_parameter_is_a_filter_or_known_to_be_none():
    filters = {name for name, row in SAMPLING_PARAMETERS.items() if row.keeps_all}
    assert filters == {"made_up", "min_p", "top_k", "top_p"}
    assert set(SAMPLING_PARAMETERS) - filters == set(NO_FILTERS.split())


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

"""Sampling parameters of a run: defaults, checks and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.sampling import SamplingParams, check_numbers, translate
from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import check_values
from torchrl_sglang.support.checks import check_count, check_mapping, given_once
from torchrl_sglang.types import LogProbsMode, ServerCapabilities

SAMPLING: Mapping[str, Any] = {"max_new_tokens": 512, "temperature": 1.0}
"""Sampling parameters of a run, unless ``generate_kwargs`` has others."""


def read_sampling(generate_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a run's sampling parameters, with its defaults."""
    params = dict(check_mapping("generate_kwargs", generate_kwargs or {}))
    for name in params:
        if not isinstance(name, str):
            raise ConfigurationError(f"generate_kwargs has the name {name!r}, no text.")
    if "max_tokens" in params:
        max_tokens = params.pop("max_tokens")
        params["max_new_tokens"] = given_once(
            "max_new_tokens", params.get("max_new_tokens"), "max_tokens", max_tokens
        )
    check_numbers(params)
    if {"n", "num_return_sequences"} & params.keys():
        raise ConfigurationError(
            "generate_kwargs has the number of responses to a prompt; give it as "
            "group_size=...."
        )
    sampling = {**SAMPLING, **params}
    if sampling["max_new_tokens"] is not None:
        check_count("max_new_tokens", sampling["max_new_tokens"])
    check_values(translate(sampling).engine)
    return sampling


def warn_of_greedy_groups(sampling: Mapping[str, Any], stacklevel: int) -> None:
    """Warns of temperature 0, which makes the responses of a group equal."""
    if translate(sampling).engine.get("temperature") == 0:
        warnings.warn(
            "temperature=0 gives all responses of a group the same tokens, and unless "
            "their tools or environments differ the same rewards, which teaches "
            "nothing: give generate_kwargs a temperature above 0, such as 1.0. "
            "Evaluation is greedy anyway.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def check_sampling(
    params: Mapping[str, Any], mode: LogProbsMode, capabilities: ServerCapabilities
) -> None:
    """Refuses sampling that servers cannot report; warns of untrained distributions."""
    request = GenerateRequest(input_ids=[0], sampling_params=params, logprobs_mode=mode)
    plan = plan_request(request, capabilities)
    checked, name = plan.request.sampling_params, plan.token_filter
    if mode == "behaviour":
        if not plan.replayable:
            remedy = "" if name else " A top_k has supports, for a grammar."
            warnings.warn(
                f"A penalty, a bias, min_new_tokens or a grammar among "
                f"{sorted(checked)} changes what tokens are drawn from, and the "
                f"trainer replays temperature and support alone: the first ratio is "
                f"not 1.{remedy} Leave it out, or give "
                f"correction='decoupled_token_is'.",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    if not name and plan.temperature not in (None, 1.0):
        name = "temperature"
    if name:
        value = checked.get(name, capabilities.default_sampling_params.get(name))
        warnings.warn(
            f"Tokens are drawn with {name}={value!r}, and the whole vocabulary is "
            f"trained at temperature 1: the gradient is that of another policy. Give "
            f"logprobs_mode='behaviour', which trains what is drawn from, or "
            f"generate_kwargs with temperature=1.0 alone.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_sampling_of_agents(params: Mapping[str, Any]) -> None:
    """Refuses parameters that choose a policy's outputs, which agents do not get."""
    chosen, plain = translate(params), SamplingParams()
    for name in (field.name for field in fields(plain) if field.name != "engine"):
        value = getattr(chosen, name)
        if value != getattr(plain, name):
            raise ConfigurationError(
                f"generate_kwargs sets {name}={value!r}, and an agent's requests say "
                f"themselves what they return; leave it out."
            )

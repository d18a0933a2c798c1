"""Checks that two runs of a collection are the same."""

from __future__ import annotations

import warnings

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.requests.sampling import temperature_of


def check_deterministic(
    policy: SGLangWrapper, *, max_staleness: int, of_agents: bool
) -> None:
    """Refuses arguments that make a batch depend on timing.

    Warns of servers with a prefix cache, which repeats single turns only.
    """
    if max_staleness:
        raise ConfigurationError(
            f"deterministic=True needs max_staleness=0, got {max_staleness}: which "
            f"tokens are of which weights depends on timing otherwise."
        )
    if of_agents:
        raise ConfigurationError(
            "deterministic=True does not go with agent: an agent sends requests when "
            "it likes, so that they have no number of their own. Give step or tools "
            "instead, or leave deterministic out."
        )
    params = policy.sampling_params.engine
    if "sampling_seed" in params:
        raise ConfigurationError(
            f"deterministic=True gives each response a seed of its own, and the "
            f"policy has seed={params['sampling_seed']!r} for all; leave that out, and "
            f"give the run's seed to the collector."
        )
    capabilities = policy.model.capabilities
    if not capabilities.uses_seeds and temperature_of(params, capabilities) != 0:
        raise UnsupportedByServerError(
            "deterministic=True gives each response a seed, which the servers would "
            "ignore: they were started without deterministic mode. Start them with "
            "AsyncSGLang.from_pretrained(..., deterministic=True), which needs GPUs; "
            "on CPU SGLang has no such mode: sample with temperature=0 there."
        )
    if capabilities.uses_seeds and not capabilities.args.disable_radix_cache:
        warnings.warn(
            "deterministic=True, and the servers have a prefix cache: a later turn "
            "that goes on from what decoding has left there differs in its last bits, "
            "and so in some runs in its tokens. Start them with "
            "disable_radix_cache=True.",
            UserWarning,
            stacklevel=3,
        )

"""Configurations of off-policy correction: verl's names, and what is refused."""

from __future__ import annotations

import pytest

from torchrl_sglang import RolloutCorrectionConfig
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.config import as_config


def test_the_defaults_are_those_of_verl():
    config = RolloutCorrectionConfig()
    assert config == as_config("decoupled_seq_is")
    assert config.weight_bounds == (None, 2.0)
    geometric = as_config("decoupled_geo_rs").rejections[0]
    assert geometric.bounds == (0.999, 1.001)
    assert as_config("decoupled_token_icepop").weight_bounds == (0.5, 5.0)


def test_thresholds_of_several_criteria():
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1, seq_sum_k3,token_k1", rollout_rs_threshold="0.5_4, 0.1"
    )
    found = [(each.name, each.bounds) for each in config.rejections]
    assert found == [("token_k1", (0.5, 4.0)), ("seq_sum_k3", (0.0, 0.1))]
    shared = RolloutCorrectionConfig(
        rollout_rs="token_k2,seq_max_k2", rollout_rs_threshold=0.3
    )
    assert [each.bounds for each in shared.rejections] == [(0.0, 0.3)] * 2
    upper = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=4)
    assert upper.rejections[0].bounds == (0.25, 4.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is='tokens' is not one"),
        ({"rollout_is_threshold": 0}, "positive, finite number, got 0"),
        ({"rollout_is_threshold": "low_high"}, "'low_high'"),
        ({"rollout_is_threshold": (3.0, 2.0)}, "lower bound first"),
        ({"rollout_is_threshold": True}, "got True"),
        ({"rollout_is_batch_normalize": 1}, "must be a bool"),
        ({"rollout_rs": "token_k1"}, "needs one threshold"),
        ({"rollout_rs_threshold": 2.0}, "no effect"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "seq_max_k"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0}, "Did you mean"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "upper bound only"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "at least 1"),
        (
            {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
            "one for each",
        ),
        ({"loss_type": "pg"}, "'pg' is not one of 'ppo_clip', 'reinforce'"),
        ({"proximal": "linear"}, "'interpolated'"),
        ({"proximal": "interpolated", "bypass_mode": True}, "no proximal policy"),
        ({"veto_threshold": -1}, "veto_threshold"),
        ({"dppo_threshold": (0.2, 0)}, "dppo_threshold"),
        ({"max_staleness": -1}, "at least 0"),
        ({"rejected": "dropped"}, "'masked', 'zeroed'"),
    ],
)
def test_invalid_settings_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        RolloutCorrectionConfig(**arguments)


def test_a_name_that_is_no_preset():
    with pytest.raises(ConfigurationError, match="Did you mean 'decoupled_token_is'"):
        as_config("decoupled_tokens_is")
    with pytest.raises(ConfigurationError, match="got 3"):
        as_config(3)
    for value in (3, None, ["rollout_is"]):
        with pytest.raises(ConfigurationError, match="not a preset"):
            RolloutCorrectionConfig.preset(value)

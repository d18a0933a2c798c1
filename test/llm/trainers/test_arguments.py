"""What a run makes of its arguments before anything is started."""

from __future__ import annotations

import inspect

from torchrl_sglang import GRPO


def test_a_logger_is_told_of_arguments_alone(tmp_path):
    run = GRPO(
        "model",
        prompts=[{"query": "Say 1."}],
        rewards=len,
        lora={"r": 8},
        engine={"api_key": "secret"},
        output=tmp_path,
    )
    told = run.hyperparameters
    assert {name.partition(".")[0] for name in told} < {
        *inspect.signature(GRPO).parameters
    }
    assert told["rewards"] == "len"
    assert told["lora.r"] == 8
    assert told["engine.api_key"] == "***"

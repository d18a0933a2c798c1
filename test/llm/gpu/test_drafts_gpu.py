"""Weight updates of servers with a draft model, and of quantised ones."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from helpers.gpu import NEEDS_GPU, TOLERANCE, new_model
from helpers.log_probs import response_difference

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError

pytestmark = NEEDS_GPU

PROMPT = [5, 6, 7, 8]


def tokens_of_a_step(engine) -> float:
    """Mean number of tokens that the model accepts at a time, greedily."""
    reply: Any = requests.post(
        f"{engine.server_url}/generate",
        json={
            "input_ids": PROMPT,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 200,
                "ignore_eos": True,
            },
            "extra_key": engine.weight_version,
        },
        timeout=300,
    ).json()
    meta = reply["meta_info"]
    return meta["completion_tokens"] / meta["spec_verify_ct"]


def difference(engine, model) -> float:
    (answer,) = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 64, "ignore_eos": True},
        return_logprobs=True,
    )
    return response_difference(answer, PROMPT, model)


def test_an_update_leaves_a_draft_of_its_own_alone(draft_engine):
    engine = draft_engine
    assert engine.capabilities.draft == "separate"
    assert difference(engine, new_model(0)) < TOLERANCE
    # In half precision the two models do not agree on every token, nor twice on the
    # same ones.
    assert tokens_of_a_step(engine) > 2
    scheme = SGLangWeightSyncScheme(engine, transport="cuda_ipc")
    sender = scheme.create_sender()
    model = new_model(3)
    sender.update_weights(model)
    assert difference(engine, model) < TOLERANCE
    # The draft has the old weights: it proposes what the new model does not say.
    assert tokens_of_a_step(engine) < 1.5
    model = new_model(0)
    sender.update_weights(model)
    assert difference(engine, model) < TOLERANCE
    assert tokens_of_a_step(engine) > 2
    scheme.shutdown()


def test_files_would_overwrite_the_draft(draft_engine, tmp_path):
    scheme = SGLangWeightSyncScheme(draft_engine, transport="disk", directory=tmp_path)
    with pytest.raises(UnsupportedByServerError, match="overwrite the draft"):
        scheme.create_sender().update_weights(new_model(3))
    with pytest.raises(UnsupportedByServerError, match="overwrite the draft"):
        scheme.create_sender().recover()
    assert difference(draft_engine, new_model(0)) < TOLERANCE


def test_a_quantised_server_is_left_alone(quantized_engine):
    engine = quantized_engine
    assert engine.capabilities.quantized == "fp8"

    def greedy() -> list[int]:
        (answer,) = engine.generate(
            input_ids=PROMPT,
            sampling_params={"temperature": 0, "max_new_tokens": 16},
        )
        return answer.token_ids

    before = greedy()
    scheme = SGLangWeightSyncScheme(engine)
    with pytest.raises(UnsupportedByServerError, match="'fp8'"):
        scheme.create_sender().update_weights(new_model(3))
    assert greedy() == before

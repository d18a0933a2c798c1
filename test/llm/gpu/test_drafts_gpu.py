"""Servers with a draft model, their weight updates, and those of quantised ones."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import requests
from helpers.drafts import (
    PROMPT,
    assert_same,
    assert_samples_of,
    chain_model,
    difference,
    greedy,
    update,
)
from helpers.gpu import NEEDS_GPU, SPECULATIVE_STEPS, TOLERANCE, new_model

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError

pytestmark = NEEDS_GPU


def acceptance(engine) -> float:
    """Share of the draft's tokens that the model accepts, greedily."""
    accepted = []
    for first in range(5, 13):
        reply: Any = requests.post(
            f"{engine.server_url}/generate",
            json={
                "input_ids": [first, *PROMPT],
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 120,
                    "ignore_eos": True,
                },
                "extra_key": engine.weight_version,
            },
            timeout=300,
        ).json()
        meta = reply["meta_info"]
        step = meta["completion_tokens"] / meta["spec_verify_ct"]
        accepted.append((step - 1) / SPECULATIVE_STEPS)
    return fmean(accepted)


@pytest.fixture
def drafts(draft_engine) -> Iterator[AsyncSGLang]:
    """The server with a draft; afterwards both models are those of its start."""
    yield draft_engine
    update(draft_engine, new_model(0), draft="update")


def test_acceptance_follows_the_weights_of_both_models(drafts):
    assert drafts.capabilities.draft == "separate"
    update(drafts, chain_model(0), draft="update")
    assert acceptance(drafts) > 0.95
    for options in ({}, {"draft": "keep"}):
        # The draft proposes what the old weights say.
        update(drafts, chain_model(1), **options)
        assert difference(drafts, chain_model(1)) < TOLERANCE
        assert acceptance(drafts) < 0.2
    update(drafts, chain_model(1), draft="update")
    assert difference(drafts, chain_model(1)) < TOLERANCE
    assert acceptance(drafts) > 0.95
    # The draft has the same weights as the target now, whichever were sent first.
    update(drafts, chain_model(0))
    assert acceptance(drafts) < 0.2


def test_files_go_to_both_models_where_that_is_asked_for(drafts, tmp_path):
    scheme = SGLangWeightSyncScheme(
        drafts, transport="disk", directory=tmp_path, draft="update"
    )
    scheme.create_sender().update_weights(chain_model(2))
    scheme.shutdown()
    assert difference(drafts, chain_model(2)) < TOLERANCE
    assert acceptance(drafts) > 0.95


@pytest.mark.parametrize("seed", [0, 1], ids=["accepted", "rejected"])
def test_drafts_change_no_token_and_no_log_prob(drafts, gpu_engine, seed):
    """The oracle is the same engine without drafts."""
    model = chain_model(seed)
    update(drafts, chain_model(0), draft="update")
    update(drafts, model)
    scheme = SGLangWeightSyncScheme(gpu_engine)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    assert_same(greedy(gpu_engine), greedy(drafts))


@pytest.mark.parametrize("seed", [0, 3], ids=["the same draft", "another draft"])
def test_drafts_change_no_probability(drafts, seed):
    """The oracle is every continuation's probability by transformers, summed up."""
    update(drafts, new_model(0), draft="update")
    model = new_model(seed)
    update(drafts, model)
    assert_samples_of(drafts, model)


def test_files_would_overwrite_the_draft(draft_engine, tmp_path):
    scheme = SGLangWeightSyncScheme(draft_engine, transport="disk", directory=tmp_path)
    with pytest.raises(UnsupportedByServerError, match="overwrite the draft"):
        scheme.create_sender().update_weights(new_model(3))
    with pytest.raises(UnsupportedByServerError, match="overwrite the draft"):
        scheme.create_sender().recover()
    assert difference(draft_engine, new_model(0)) < TOLERANCE


def test_tensors_would_end_the_server(draft_engine):
    if draft_engine.capabilities.feeds_draft:
        pytest.skip("this SGLang gives tensors to every draft")
    scheme = SGLangWeightSyncScheme(draft_engine, transport="cuda_ipc", draft="update")
    with pytest.raises(UnsupportedByServerError, match="ends when it is given tensors"):
        scheme.create_sender().update_weights(new_model(3))
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

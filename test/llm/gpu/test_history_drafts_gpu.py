"""Drafts from earlier responses: what servers are given, accept and answer with."""

from __future__ import annotations

import pytest
from helpers.collecting import wait_until
from helpers.drafts import (
    PROMPT,
    assert_same,
    assert_samples_of,
    chain_model,
    difference,
    greedy,
    update,
)
from helpers.gpu import NEEDS_GPU, TOLERANCE, new_model

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.support.event_loop import run_sync

pytestmark = NEEDS_GPU


def passes(engine: AsyncSGLang) -> tuple[int, int]:
    """Tokens of responses, and the passes that they took."""
    found = engine.generate(
        input_ids=[[first, *PROMPT] for first in range(5, 13)],
        sampling_params={"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
    )
    return sum(len(each.token_ids) for each in found), sum(
        each.verify_passes for each in found
    )


def test_an_epoch_is_drafted_from_the_one_before(history_engine, gpu_engine):
    """The oracle of tokens and log-probs is the same engine without drafts."""
    model = chain_model(0)
    update(history_engine, model)
    scheme = SGLangWeightSyncScheme(gpu_engine)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    # SGLang itself drafts from what is in this server's cache, which a flush empties.
    passes(history_engine)
    history_engine.flush_cache()
    passes(history_engine)
    wait_until(lambda: history_engine.stats().drafts.sent_tokens > 8 * 64)
    (held,) = run_sync(history_engine.control.draft_texts())
    (tokens,) = held.values()
    assert tokens == history_engine.stats().drafts.sent_tokens
    history_engine.flush_cache()
    tokens, count = passes(history_engine)
    assert tokens / count > 4
    history_engine.flush_cache()
    assert_same(greedy(gpu_engine), greedy(history_engine))


@pytest.mark.parametrize("transport", ["cuda_ipc", "disk"])
def test_weights_change_below_the_texts(history_engine, transport, tmp_path):
    if transport == "disk" and not history_engine.capabilities.selects_draft:
        pytest.skip("this SGLang ends when it is to load files")
    options = {"directory": tmp_path} if transport == "disk" else {}
    for seed in (1, 0):
        model = chain_model(seed)
        scheme = SGLangWeightSyncScheme(history_engine, transport=transport, **options)
        scheme.create_sender().update_weights(model)
        scheme.shutdown()
        assert difference(history_engine, model) < TOLERANCE


def test_drafts_change_no_probability(history_engine):
    """The oracle is every continuation's probability by transformers, summed up."""
    model = new_model(3)
    update(history_engine, model)
    assert_samples_of(history_engine, model)
    # With texts of that model, most of which are other samples.
    wait_until(lambda: history_engine.stats().drafts.prompts > 0)
    assert_samples_of(history_engine, model)


def test_servers_that_take_no_texts(gpu_engine):
    with pytest.raises(UnsupportedByServerError, match="--speculative-algorithm NGRAM"):
        AsyncSGLang.connect(gpu_engine.server_url, drafts="history")

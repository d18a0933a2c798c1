"""Servers with a draft model, their weight updates, and those of quantised ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import requests
import torch
from helpers.gpu import NEEDS_GPU, SPECULATIVE_STEPS, TOLERANCE, new_model
from helpers.log_probs import response_difference

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError

pytestmark = NEEDS_GPU

PROMPT = [5, 6, 7, 8]
SAMPLES = 4096
SMALLEST_P = 1e-4
"""Of the chi-square tests, of which there are few: a wrong sampler is far below."""


def chain_model(seed: int) -> torch.nn.Module:
    """Returns a model that says one token after each, another one for each seed.

    Its likeliest token is far before the next one, so that rounding changes none.
    """
    model = new_model(0)
    generator = torch.Generator().manual_seed(seed)
    size = model.lm_head.weight.shape[0]
    order = torch.randperm(size, generator=generator).to("cuda:0")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight[order])
    return model


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


def update(engine, model: torch.nn.Module, **options: Any) -> None:
    """Updates the server; by files where it cannot give its draft tensors."""
    with tempfile.TemporaryDirectory() as folder:
        if options.get("draft") == "update" and not engine.capabilities.feeds_draft:
            options |= {"transport": "disk", "directory": folder}
        scheme = SGLangWeightSyncScheme(engine, **{"transport": "cuda_ipc", **options})
        scheme.create_sender().update_weights(model)
        scheme.shutdown()


def difference(engine, model) -> float:
    (answer,) = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 64, "ignore_eos": True},
        return_logprobs=True,
    )
    return response_difference(answer, PROMPT, model)


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


def greedy(engine) -> list[tuple[list[int], list[float]]]:
    found = engine.generate(
        input_ids=[[first, *PROMPT] for first in range(5, 21)],
        sampling_params={
            "max_new_tokens": 64,
            "temperature": 0.0,
            "ignore_eos": True,
        },
        return_logprobs=True,
    )
    return [(list(each.token_ids), list(each.log_probs)) for each in found]


@pytest.mark.parametrize("seed", [0, 1], ids=["accepted", "rejected"])
def test_drafts_change_no_token_and_no_log_prob(drafts, gpu_engine, seed):
    """The oracle is the same engine without drafts."""
    model = chain_model(seed)
    update(drafts, chain_model(0), draft="update")
    update(drafts, model)
    scheme = SGLangWeightSyncScheme(gpu_engine)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    plain, drafted = greedy(gpu_engine), greedy(drafts)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    gaps = [
        abs(one - other)
        for (_, first), (_, second) in zip(plain, drafted, strict=True)
        for one, other in zip(first, second, strict=True)
    ]
    assert max(gaps) < TOLERANCE


@torch.no_grad()
def marginals(model: torch.nn.Module, length: int) -> list[torch.Tensor]:
    """Returns the exact distribution of each of the first tokens, by enumeration."""
    texts = torch.tensor([PROMPT], device="cuda:0")
    weights = torch.ones(1, device="cuda:0", dtype=torch.float64)
    found = []
    for _ in range(length):
        logits = torch.cat([model(part).logits[:, -1] for part in texts.split(1024)])
        joint = weights[:, None] * logits.double().softmax(-1)
        found.append(joint.sum(0).cpu())
        size = joint.shape[1]
        texts = torch.cat(
            [
                texts.repeat_interleave(size, 0),
                torch.arange(size, device="cuda:0").repeat(len(texts))[:, None],
            ],
            1,
        )
        weights = joint.flatten()
    return found


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns Pearson's test of counts; rare tokens are one class together."""
    common = expected >= 5
    classes = [counts[common], counts[~common].sum()[None]]
    wanted = [expected[common], expected[~common].sum()[None]]
    observed, mean = torch.cat(classes), torch.cat(wanted)
    statistic = float(((observed - mean) ** 2 / mean.clamp_min(1e-9)).sum())
    # The survival function of chi-square.
    half = torch.tensor([len(mean) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))


@pytest.mark.parametrize("seed", [0, 3], ids=["the same draft", "another draft"])
def test_drafts_change_no_probability(drafts, seed):
    """The oracle is every continuation's probability by transformers, summed up."""
    update(drafts, new_model(0), draft="update")
    model = new_model(seed)
    update(drafts, model)
    # After the first token, of the prefill, drafts are accepted or rejected.
    answers = drafts.generate(
        input_ids=[PROMPT] * SAMPLES,
        sampling_params={"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True},
    )
    tokens = torch.tensor([list(each.token_ids) for each in answers])
    expected = marginals(model, 3)
    for position, probability in enumerate(expected):
        size = len(probability)
        counts = torch.bincount(tokens[:, position], minlength=size).double()
        assert p_value(counts, SAMPLES * probability) > SMALLEST_P
    # A sampler of other weights is found out by the same test.
    other = marginals(new_model(5), 1)[0]
    counts = torch.bincount(tokens[:, 0], minlength=len(other)).double()
    assert p_value(counts, SAMPLES * other) < SMALLEST_P


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

"""Models and oracles of the tests of speculative decoding."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from helpers.gpu import TOLERANCE, new_model
from helpers.log_probs import response_difference
from torchrl_sglang import SGLangWeightSyncScheme

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
        embeddings = model.model.embed_tokens.weight
        # The padding's is zero, after which all tokens are as likely.
        embeddings[0] = embeddings[1].flip(0)
        model.lm_head.weight.copy_(embeddings[order])
    return model


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


def assert_same(plain, drafted) -> None:
    """Two servers gave the same tokens, with the same log-probs but for rounding."""
    found, wanted = ([tokens for tokens, _ in each] for each in (drafted, plain))
    others = [i for i, each in enumerate(wanted) if found[i] != each]
    assert not others, [(found[i], wanted[i]) for i in others]
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


def assert_samples_of(engine, model: torch.nn.Module) -> None:
    """A server's samples are those of a model, by a chi-square test."""
    # After the first token, of the prefill, drafts are accepted or rejected.
    answers = engine.generate(
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

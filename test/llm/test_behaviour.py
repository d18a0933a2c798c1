"""``logprobs_mode="behaviour"``: the distribution that tokens were really drawn from.

The oracle is Hugging Face's model: its logits, divided by the temperature, over the
tokens that top-k, top-p and min-p leave.
"""

from __future__ import annotations

import copy
import random

import pytest
import requests
import torch
from helpers.branches import ask_twice
from helpers.fake_server import SAMPLING_LOG_PROB, FakeServer
from helpers.log_probs import TOLERANCE, score
from helpers.samplers import expected
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import AsyncSGLang, Gateway, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.objectives.support import warn_of_sampling

LENGTH = 5


def sampler(generator):
    """Sampling parameters, filters in all combinations."""
    return {
        "max_new_tokens": LENGTH,
        "ignore_eos": True,
        "temperature": generator.choice([0.0, 0.5, 0.7, 1.0, 1.3]),
        "top_k": generator.choice([1, 5, 50, 4096]),
        "top_p": generator.choice([1.0, 0.9, 0.6]),
        "min_p": generator.choice([0.0, 0.05, 0.2]),
    }


def check(completion, model, prompt, params):
    """Holds a response to a model, and returns the number of its tokens."""
    supports = completion.columns["sampling_support"].tolist()
    wanted = expected(model, prompt, completion.token_ids, params)
    for own, (support, edge, _) in zip(supports, wanted, strict=True):
        assert set(own) ^ support <= edge
    error = max(
        abs(own - log_prob)
        for own, (_, _, log_prob) in zip(completion.log_probs, wanted, strict=True)
    )
    assert error < TOLERANCE
    return len(supports)


@pytest.mark.slow
def test_two_hundred_responses(engine, hf_model):
    generator = random.Random(0)
    params = [sampler(generator) for _ in range(200)]
    prompts = [[generator.randrange(5, 95) for _ in range(4)] for _ in params]
    completions = engine.generate(
        input_ids=prompts,
        sampling_params=params,
        return_logprobs=True,
        logprobs_mode="behaviour",
    )
    for completion, prompt, own in zip(completions, prompts, params, strict=True):
        assert check(completion, hf_model, prompt, own) == LENGTH
        temperatures = completion.columns["sampling_temperature"].tolist()
        assert temperatures == pytest.approx([own["temperature"] or 1.0] * LENGTH)


def test_temperature_alone(engine, hf_model, tiny_model_path):
    """Any token can be drawn: no support, and no top_k is needed."""
    params = {"max_new_tokens": LENGTH, "ignore_eos": True}
    asked = {"return_logprobs": True, "logprobs_mode": "behaviour"}
    prompt, warm = [5, 6, 7], {**params, "temperature": 0.7}
    (completion,) = engine.generate(input_ids=prompt, sampling_params=params, **asked)
    assert completion.columns["sampling_support"].tolist() == [[]] * LENGTH
    wanted = score(hf_model, [*prompt, *completion.token_ids])[len(prompt) :]
    assert (torch.tensor(completion.log_probs) - wanted).abs().max() < TOLERANCE
    with pytest.raises(UnsupportedByServerError, match="ORIGINAL_LOGPROB.* a top_k of"):
        engine.generate(input_ids=prompt, sampling_params=warm, **asked)
    with (
        FakeServer(tiny_model_path, original_log_probs=False) as server,
        AsyncSGLang.connect(server.url) as other,
    ):
        (completion,) = other.generate(input_ids=prompt, sampling_params=warm, **asked)
        # It is an old one: it reports no support.
        with pytest.raises(UnsupportedByServerError, match="top_p=0.9.* 0.5.20"):
            other.generate(
                input_ids=prompt, sampling_params={**warm, "top_p": 0.9}, **asked
            )
    assert completion.log_probs == [SAMPLING_LOG_PROB] * LENGTH
    assert completion.columns["sampling_temperature"].tolist() == pytest.approx(
        [0.7] * LENGTH
    )


def test_a_token_behind_which_all_are_equal(restored_engine, hf_model):
    """Such logits, of an embedding of zeros, look like those that were divided."""
    model = copy.deepcopy(hf_model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        assert model(torch.tensor([[0]])).logits.std() < 1e-6
    scheme = SGLangWeightSyncScheme(restored_engine)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    with (
        AsyncSGLang.connect(restored_engine.server_url) as other,
        pytest.raises(UnsupportedByServerError, match="ORIGINAL_LOGPROB"),
    ):
        other.generate(
            input_ids=[5, 6, 7],
            sampling_params={"max_new_tokens": 2, "temperature": 0.7},
            return_logprobs=True,
            logprobs_mode="behaviour",
        )


def test_a_loss_tells_of_it(monkeypatch):
    monkeypatch.setattr("torchrl_sglang.objectives.support._told", set())
    batch = TensorDict(
        sampling_support=TensorDict(full_counts=torch.tensor([[0, 3]]), batch_size=1),
        batch_size=1,
    )
    warn_of_sampling(TensorDict(batch_size=1))
    with pytest.warns(RuntimeWarning, match="with top-k, top-p or min-p, and"):
        warn_of_sampling(batch)
    warn_of_sampling(batch)


@pytest.mark.parametrize("name", ["bias", "penalty", "minimum", "stop"])
def test_changed_logits(engine, hf_model, name):
    """What changes the logits is in the log-prob: of all tokens it can be drawn for."""
    changes = {
        "bias": {"logit_bias": {"9": 3.0}},
        "penalty": {"presence_penalty": 1.5},
        # Their supports lack what they forbid.
        "minimum": {"min_new_tokens": LENGTH},
        "stop": {"stop": ["\n\n\n"]},
    }
    params = {"max_new_tokens": LENGTH, "temperature": 0.7, "top_k": 99, "top_p": 0.9}
    prompt = [5, 6, 7]
    (completion,) = engine.generate(
        input_ids=prompt,
        sampling_params={**params, **changes[name]},
        return_logprobs=True,
        logprobs_mode="behaviour",
    )
    ids = completion.token_ids
    with torch.no_grad():
        rows = hf_model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    supports = completion.columns["sampling_support"].tolist()
    for place, (row, kept) in enumerate(zip(rows.double(), supports, strict=True)):
        if name == "bias":
            row[9] += 3.0
        if name == "penalty":
            row[sorted(set(ids[:place]))] -= 1.5
        scaled = row / params["temperature"]
        wanted = float(scaled[ids[place]] - scaled[kept].logsumexp(0))
        assert abs(completion.log_probs[place] - wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"top_p": 0.9}, UnsupportedByServerError, "top_p=0.9.*top_k of 1 to 4096"),
        ({"min_p": 0.1}, UnsupportedByServerError, "min_p=0.1.*generate_kwargs"),
        ({"top_k": 5, "top_logprobs": 2}, ConfigurationError, "top_logprobs=2 was"),
    ],
)
def test_refused(engine, options, error, words):
    with pytest.raises(error, match=words):
        engine.generate(
            input_ids=[5, 6], return_logprobs=True, logprobs_mode="behaviour", **options
        )


def test_the_wrapper(engine, hf_model):
    prompt = [5, 6, 7]
    params = {"max_new_tokens": LENGTH, "ignore_eos": True, "top_k": 20, "top_p": 0.8}
    policy = SGLangWrapper(
        engine,
        input_mode="tokens",
        generate_kwargs={**params, "temperature": 0.7},
        logprobs_mode="behaviour",
    )
    assert {"sampling_support", "sampling_temperature"} <= set(policy.out_keys)
    prompts = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(prompt)))])
    row = policy(prompts)[0]
    ids = row["tokens", "response"].tolist()
    wanted = expected(hf_model, prompt, ids, {**params, "temperature": 0.7})
    log_probs = torch.tensor([log_prob for _, _, log_prob in wanted])
    assert (row["log_probs", "response"] - log_probs).abs().max() < TOLERANCE
    assert row["sampling_temperature", "full"].tolist() == pytest.approx(
        [1.0] * 3 + [0.7] * LENGTH
    )
    counts = row["sampling_support", "full_counts"].tolist()
    assert counts == [0] * 3 + [len(kept) for kept, _, _ in wanted]


CHAT = ("chat/completions", {})
STREAM = ("chat/completions", {"stream": True})
CLAUDE = ("messages", {})


@pytest.mark.parametrize(
    "dialect", [CHAT, STREAM, CLAUDE], ids=["chat", "sse", "claude"]
)
def test_the_gateway(engine, hf_model, dialect):
    """A client sets top-p itself, and the gateway has the top_k for it."""
    path, further = dialect
    bound = {"top_k": 4096}
    with Gateway(
        engine, logprobs_mode="behaviour", default_sampling_params=bound
    ) as gateway:
        session = gateway.session("a")

        def say(messages):
            requests.post(
                f"{session.base_url}/{path}",
                json={
                    "model": "m",
                    "messages": messages,
                    "max_tokens": LENGTH,
                    "temperature": 0.7,
                    "top_p": 0.8,
                    **further,
                },
                headers={"Authorization": f"Bearer {session.key}"},
                timeout=60,
            ).raise_for_status()

        first = [{"role": "user", "content": "Hi"}]
        say(first)
        # Two other beginnings of the same conversation: branches of their own.
        for text in ("Ho", "Hu"):
            say(
                [
                    *first,
                    {"role": "assistant", "content": "?"},
                    {**first[0], "content": text},
                ]
            )
        turns = gateway.session("a").turns
        rows = gateway.to_tensordict()
    assert len(turns) == len(rows) == 3
    params = {"temperature": 0.7, "top_p": 0.8}
    for turn, row in zip(turns, rows, strict=True):
        ids = turn.completion.token_ids
        prompt = row["tokens", "full"].tolist()[: -len(ids)]
        assert check(turn.completion, hf_model, prompt, params) == len(ids)
        counts = row["sampling_support", "full_counts"].tolist()
        assert counts == [0] * len(prompt) + [
            len(kept) for kept in turn.completion.columns["sampling_support"].tolist()
        ]


def test_a_client_without_a_bound(engine):
    """Its top-p is refused, and it is told of the gateway's remedy."""
    with Gateway(engine, logprobs_mode="behaviour") as gateway:
        session = gateway.session("a")
        answer = requests.post(
            f"{session.base_url}/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user", "content": "Hi"}],
                "top_p": 0.8,
            },
            headers={"Authorization": f"Bearer {session.key}"},
            timeout=60,
        )
    assert 400 <= answer.status_code < 500
    assert "default_sampling_params" in answer.json()["error"]["message"]


def test_branches_of_a_gateway(engine, hf_model):
    """Two continuations of a turn: both have its supports, and each its own."""
    bound = {"top_k": 4096, "top_p": 0.8, "temperature": 0.7}
    with Gateway(
        engine, logprobs_mode="behaviour", default_sampling_params=bound
    ) as gateway:
        ask_twice(gateway.session("a"), max_tokens=LENGTH)
        turns = gateway.session("a").turns
        rows = gateway.to_tensordict()
    assert (len(turns), len(rows)) == (3, 2)
    for row, last in zip(rows, turns[1:], strict=True):
        tokens = row["tokens", "full"].tolist()
        counts = row["sampling_support", "full_counts"].tolist()
        flat = row["sampling_support", "full"].tolist()
        placed = [place for place, count in enumerate(counts) if count]
        parts = [turns[0].completion.token_ids, last.completion.token_ids]
        assert [tokens[place] for place in placed] == [*parts[0], *parts[1]]
        wanted = [
            *turns[0].completion.columns["sampling_support"].tolist(),
            *last.completion.columns["sampling_support"].tolist(),
        ]
        assert flat[: sum(counts)] == [each for one in wanted for each in one]
        prompt = tokens[: placed[len(parts[0])]]
        assert check(last.completion, hf_model, prompt, bound) == len(parts[1])

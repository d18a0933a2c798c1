"""Requests to servers that draft tokens: what would not be what was asked for."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.sampling import check_sampling_params

EAGLE = {"speculative_algorithm": "EAGLE"}
NGRAM = {"speculative_algorithm": "NGRAM"}
LOSSY = {**EAGLE, "speculative_accept_threshold_acc": 0.9}
SEEDED = {**EAGLE, "enable_deterministic_inference": True}


@pytest.mark.parametrize(
    ("server_args", "params", "why"),
    [
        (EAGLE, {"min_p": 0.1}, "min_p=0.1 would be ignored"),
        (LOSSY, {}, "threshold_acc=0.9"),
        (LOSSY, {"temperature": 0.7}, "temperature=0.7 would give other samples"),
        ({**EAGLE, "speculative_accept_threshold_single": 0.3}, {}, "single=0.3"),
        (SEEDED, {"seed": 3}, "drafts tokens"),
        (NGRAM, {}, "would sample token 0 too often"),
        (NGRAM, {"temperature": 0.5}, "another algorithm"),
    ],
)
def test_distributions_that_speculation_would_not_sample_are_refused(
    tiny_model_path, server_args, params, why
):
    with (
        FakeServer(tiny_model_path, server_args=server_args) as server,
        AsyncSGLang.connect(server.url, model=tiny_model_path) as engine,
    ):
        server.requests.clear()
        with pytest.raises(UnsupportedByServerError, match=why):
            ask(engine, max_new_tokens=4, **params)
        assert not server.payloads("/generate")
        # Greedy tokens are the same, and the first token follows no draft.
        ask(engine, **{**params, "max_new_tokens": 4, "temperature": 0})
        if "seed" not in params:
            ask(engine, max_new_tokens=1, **params)
        assert server.payloads("/generate")


@pytest.mark.parametrize("server_args", [EAGLE, {}])
def test_distributions_that_speculation_samples_are_sent(tiny_model_path, server_args):
    params = {"top_p": 0.9, "top_k": 20, "temperature": 0.7, "min_p": 0.0}
    if not server_args:
        params["min_p"] = 0.1
    with (
        FakeServer(tiny_model_path, server_args=server_args) as server,
        AsyncSGLang.connect(server.url, model=tiny_model_path) as engine,
    ):
        ask(engine, max_new_tokens=4, **params)
        (request,) = server.payloads("/generate")
    (sent,) = request["sampling_params"]
    for name, value in params.items():
        assert sent.get(name, 0.0) == value


def test_min_p_that_the_servers_were_started_with(tiny_model_path):
    with (
        FakeServer(tiny_model_path, server_args=EAGLE) as server,
        AsyncSGLang.connect(server.url, model=tiny_model_path) as engine,
    ):
        preferred = {"default_sampling_params": {"min_p": 0.2}}
        capabilities = dataclasses.replace(engine.capabilities, **preferred)
    with pytest.raises(UnsupportedByServerError, match="min_p=0.2"):
        check_sampling_params({}, capabilities)
    assert check_sampling_params({"min_p": 0.0}, capabilities) == {"min_p": 0.0}


def test_deterministic_servers_do_not_draft(tiny_model_path):
    with pytest.raises(ConfigurationError, match="depend on other requests"):
        make_server_command(
            tiny_model_path,
            device="cuda",
            enable_deterministic_inference=True,
            speculative_algorithm="EAGLE",
        )


@pytest.mark.parametrize("algorithm", ["NGRAM", "ngram"])
def test_servers_on_cpus_draft_by_no_ngrams(tiny_model_path, algorithm):
    with pytest.raises(ConfigurationError, match="NVIDIA GPUs"):
        make_server_command(
            tiny_model_path, device="cpu", speculative_algorithm=algorithm
        )


def ask(engine: AsyncSGLang, **params: object) -> None:
    engine.generate(input_ids=[5, 6, 7], sampling_params=params)

"""Servers that would be broken by whole weights: with a draft model, or quantised."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError

EAGLE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "some/draft",
    "model_path": "some/model",
}
MTP = {**EAGLE, "speculative_draft_model_path": "some/model"}
OWN_MTP = {**EAGLE, "speculative_draft_model_path": None}
STANDALONE = {**EAGLE, "speculative_algorithm": "STANDALONE"}
LAYERS = {**MTP, "speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None}


@pytest.fixture
def connect(tiny_model_path):
    """Returns a function that connects to a server with such arguments."""
    made = []

    def start(server_args, *, sessions=True, model=tiny_model_path):
        server = FakeServer(model, server_args=server_args)
        if not sessions:
            del server.routes["/begin_weight_update"]
            del server.routes["/end_weight_update"]
        made.append(server.__enter__())
        made.append(AsyncSGLang.connect(server.url, model=tiny_model_path))
        return server, made[-1]

    yield start
    for each in reversed(made):
        each.__exit__(None, None, None)


def update(engine, model, transport, tmp_path, **options):
    if transport == "disk":
        options["directory"] = tmp_path
    scheme = SGLangWeightSyncScheme(engine, transport=transport, **options)
    try:
        return scheme.create_sender().update_weights(model)
    finally:
        scheme.shutdown()


@pytest.mark.parametrize(
    ("server_args", "draft", "selector"),
    [
        (EAGLE, "separate", "target"),
        (MTP, "same", "all"),
        (OWN_MTP, "same", "all"),
        (NGRAM, None, None),
        ({}, None, None),
    ],
    ids=["EAGLE3", "MTP", "MTP by itself", "NGRAM", "none"],
)
def test_an_update_says_which_model_it_is_for(
    connect, hf_model, tmp_path, server_args, draft, selector
):
    server, engine = connect(server_args)
    assert engine.capabilities.draft == draft
    assert engine.capabilities.selects_draft
    update(engine, hf_model, "cuda_ipc", tmp_path)
    for path in ("/begin_weight_update", "/update_weights_from_tensor"):
        for payload in server.payloads(path):
            assert payload.get("selector") == selector
            assert "disable_draft_model" not in payload


@pytest.mark.parametrize(
    ("server_args", "kept"), [(EAGLE, True), (MTP, None), (NGRAM, None)]
)
def test_tensors_are_kept_from_a_draft_of_its_own(
    connect, hf_model, tmp_path, server_args, kept
):
    server, engine = connect(server_args, sessions=False)
    assert not engine.capabilities.selects_draft
    update(engine, hf_model, "cuda_ipc", tmp_path)
    payloads = server.payloads("/update_weights_from_tensor")
    assert payloads
    for payload in payloads:
        assert payload.get("disable_draft_model") is kept
        assert "selector" not in payload


@pytest.mark.parametrize(
    ("server_args", "draft", "selector"),
    [
        (EAGLE, "keep", "target"),
        (EAGLE, "update", "all"),
        (STANDALONE, "update", "all"),
        (MTP, "keep", "target"),
        (MTP, "update", "all"),
        ({}, "keep", None),
    ],
)
def test_effect_of_an_update_on_a_draft_can_be_chosen(
    connect, hf_model, tmp_path, server_args, draft, selector
):
    server, engine = connect(server_args)
    update(engine, hf_model, "cuda_ipc", tmp_path, draft=draft)
    paths = ("/begin_weight_update", "/update_weights_from_tensor")
    payloads = [each for path in paths for each in server.payloads(path)]
    assert len(payloads) >= 2
    assert {each.get("selector") for each in payloads} == {selector}


@pytest.mark.parametrize(
    ("server_args", "draft", "kept"),
    [
        (EAGLE, "keep", True),
        (EAGLE, "update", None),
        (MTP, "keep", True),
        (MTP, "update", None),
        (STANDALONE, "auto", True),
        (LAYERS, "keep", True),
    ],
)
def test_the_choice_without_update_sessions(
    connect, hf_model, tmp_path, server_args, draft, kept
):
    server, engine = connect(server_args, sessions=False)
    update(engine, hf_model, "cuda_ipc", tmp_path, draft=draft)
    payloads = server.payloads("/update_weights_from_tensor")
    assert {each.get("disable_draft_model") for each in payloads} == {kept}


@pytest.mark.parametrize("sessions", [True, False])
def test_files_reach_a_draft_that_is_to_take_them(
    connect, hf_model, tmp_path, sessions
):
    server, engine = connect(EAGLE, sessions=sessions)
    update(engine, hf_model, "disk", tmp_path, draft="update")
    (payload,) = server.payloads("/update_weights_from_disk")
    assert "selector" not in payload


def test_the_choice_is_one_of_three(tiny_model_path):
    with pytest.raises(ConfigurationError, match="draft='both' is not one of 'auto'"):
        SGLangWeightSyncScheme(draft="both")


CHANGES = ("/pause_generation", "/begin_weight_update", "/update_weights_from_disk")


@pytest.mark.parametrize(
    ("server_args", "sessions", "transport", "draft", "why"),
    [
        ({}, True, "cuda_ipc", "update", "have none"),
        (NGRAM, True, "broadcast", "update", "have none"),
        (MTP, True, "disk", "keep", "overwrite the draft"),
        (EAGLE, False, "broadcast", "update", "cuda_ipc"),
        (EAGLE, True, "disk", "auto", "overwrite the draft"),
        (EAGLE, False, "disk", "auto", "overwrite the draft"),
        (MTP, False, "broadcast", "auto", "cuda_ipc"),
        (STANDALONE, False, "cuda_ipc", "update", "Use transport='disk'"),
        (LAYERS, False, "cuda_ipc", "auto", "ends when it is given tensors"),
        (NGRAM, False, "disk", "auto", "ends when it is to load files"),
        ({"quantization": "fp8"}, True, "cuda_ipc", "auto", "'fp8'"),
        ({"quantization": "fp8"}, True, "disk", "auto", "'fp8'"),
        ({"quantization": "fp8"}, True, "broadcast", "auto", "'fp8'"),
        ({"quantization": "w8a8_int8"}, False, "broadcast", "auto", "LoRA adapter"),
    ],
)
def test_updates_that_would_break_a_server_are_refused_before_sending(
    connect, hf_model, tmp_path, server_args, sessions, transport, draft, why
):
    server, engine = connect(server_args, sessions=sessions)
    with pytest.raises(UnsupportedByServerError, match=why) as raised:
        update(engine, hf_model, transport, tmp_path, draft=draft)
    assert "Nothing was sent" in str(raised.value)
    assert not {path for _, path, _ in server.requests}.intersection(CHANGES)
    greedy = {"max_new_tokens": 3, "temperature": 0}
    (answer,) = engine.generate(input_ids=[5, 6], sampling_params=greedy)
    assert answer.token_ids == [5, 6, 5]


def test_the_checkpoint_of_the_start_is_refused_as_well(connect):
    """Recovery loads files: into a draft, too, and over transformed weights."""
    for server_args in (EAGLE, {"quantization": "fp8"}):
        server, engine = connect(server_args)
        with pytest.raises(UnsupportedByServerError, match="Nothing was sent"):
            SGLangWeightSyncScheme(engine).create_sender().recover()
        assert not server.payloads("/update_weights_from_disk")


def test_a_quantised_checkpoint(connect, hf_model, tmp_path, tiny_model_path):
    """Its configuration tells it; the server's arguments need not."""
    folder = tmp_path / "quantised"
    shutil.copytree(tiny_model_path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with FakeServer(folder) as server, AsyncSGLang.connect(server.url) as engine:
        assert engine.capabilities.quantized == "fp8"
        with pytest.raises(UnsupportedByServerError, match="'fp8'"):
            update(engine, hf_model, "cuda_ipc", tmp_path)


def test_real_servers_take_every_field_that_is_sent(any_engine):
    """The routes of each generation name the fields that this package sends."""
    capabilities = any_engine.capabilities
    assert capabilities.draft is None
    assert capabilities.quantized is None
    assert capabilities.selects_draft == capabilities.needs_update_session
    assert capabilities.spares_draft != capabilities.selects_draft

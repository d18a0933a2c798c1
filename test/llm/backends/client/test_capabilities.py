from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client.capabilities import (
    check_takes_weights,
    fields_of,
    interpret,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    UnsupportedByServerError,
)

ROUTES = {
    # Those that differ between the two, and one that does not.
    "0.5.23": {"/generate", "/begin_weight_update", "/end_weight_update", "/v1/loads"},
    "0.5.20": {"/generate", "/get_load", "/get_weight_version", "/v1/loads"},
}


def answers(version: str) -> dict:
    """What a real server of that version answered, without what is not read."""
    path = "/tmp/cpu_tiny/model"
    return {
        "routes": ROUTES[version],
        "server_info": {
            "model_path": path,
            "tokenizer_path": path,
            "skip_tokenizer_init": False,
            "context_length": None,
            "dtype": "float32",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "api_key": None,
            "admin_api_key": None,
            "grammar_backend": "none",
            "max_req_input_len": 2042,
            "version": version,
        },
        "model_info": {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "model_type": "qwen2",
        },
        "models": {
            "object": "list",
            "data": [{"id": path, "object": "model", "max_model_len": 2048}],
        },
    }


def understand(given: dict):
    return interpret(url="http://one:1", vocab_size=384, **given)


@pytest.mark.parametrize("version", ROUTES)
def test_both_generations(version):
    found = understand(answers(version))
    assert found.version == version
    assert found.needs_update_session == (version == "0.5.23")
    assert found.load_route == "/v1/loads"
    assert (found.max_context, found.max_prompt, found.vocab_size) == (2048, 2041, 384)
    assert (found.tp_size, found.pp_size, found.dp_size) == (1, 1, 1)
    assert found.dtype is torch.float32
    assert found.has_tokenizer
    assert not found.has_grammar
    assert found.weight_version == "default"
    assert found.model_path == found.tokenizer_path == "/tmp/cpu_tiny/model"
    assert found.server_args["context_length"] is None


@pytest.mark.parametrize(
    ("where", "name", "value", "attribute", "expected"),
    [
        ("server_info", "dtype", "bfloat16", "dtype", torch.bfloat16),
        ("server_info", "dtype", "auto", "dtype", None),
        ("server_info", "dtype", "load", "dtype", None),
        ("server_info", "dtype", None, "dtype", None),
        ("server_info", "tp_size", 4, "tp_size", 4),
        ("server_info", "pp_size", 2, "pp_size", 2),
        ("server_info", "dp_size", 2, "dp_size", 2),
        ("server_info", "tp_size", None, "tp_size", 1),
        ("server_info", "grammar_backend", "xgrammar", "has_grammar", True),
        ("server_info", "grammar_backend", None, "has_grammar", False),
        ("server_info", "skip_tokenizer_init", True, "has_tokenizer", False),
        ("server_info", "max_req_input_len", None, "max_prompt", 2047),
        ("server_info", "version", ..., "version", "unknown"),
        ("model_info", "weight_version", "7", "weight_version", "7"),
        ("model_info", "weight_version", None, "weight_version", "default"),
        ("model_info", "weight_version", ..., "weight_version", "default"),
        ("model_info", "tokenizer_path", "/t", "tokenizer_path", "/t"),
        ("model_info", "tokenizer_path", None, "tokenizer_path", "/tmp/cpu_tiny/model"),
        ("model_info", "is_generation", ..., "model_path", "/tmp/cpu_tiny/model"),
        ("server_info", "dtype", "auto", "uses_seeds", False),
        ("server_info", "enable_deterministic_inference", True, "uses_seeds", True),
        ("server_info", "rl_on_policy_target", "fsdp", "uses_seeds", True),
        ("server_info", "dtype", "auto", "speculates", False),
        ("server_info", "speculative_algorithm", "EAGLE", "speculates", True),
        ("server_info", "speculative_algorithm", "EAGLE", "biased_drafts", False),
        ("server_info", "speculative_algorithm", "NGRAM", "biased_drafts", True),
        ("server_info", "dtype", "auto", "streams_deltas", False),
        ("server_info", "incremental_streaming_output", True, "streams_deltas", True),
        ("server_info", "stream_output", True, "streams_deltas", True),
        ("server_info", "dtype", "auto", "keeps_requests", True),
        ("server_info", "hicache_storage_backend", "file", "keeps_requests", False),
        ("model_info", "weight_version", "7", "default_sampling_params", {}),
        *(
            (
                "model_info",
                "preferred_sampling_params",
                value,
                "default_sampling_params",
                {"top_k": 3},
            )
            for value in ('{"top_k": 3}', {"top_k": 3})
        ),
    ],
)
def test_one_thing_that_differs(where, name, value, attribute, expected):
    given = copy.deepcopy(answers("0.5.23"))
    if value is ...:
        given[where].pop(name)
    else:
        given[where][name] = value
    assert getattr(understand(given), attribute) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 256),
        ({"device": "cpu"}, None),
        ({"cuda_graph_config": None}, None),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 8}}}, None),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 300}]}, 256),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 256}]}, None),
    ],
)
def test_requests_that_there_are_cuda_graphs_for(changed, expected):
    given = answers("0.5.23")
    graphs = {"decode": {"backend": "full", "max_bs": 256}}
    given["server_info"] |= {"device": "cuda", "cuda_graph_config": graphs, **changed}
    assert understand(given).graphs_up_to == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lora_name", "serialized_tensors"}, "serialized_tensors"),
        ({"lora_name", "serialized_named_tensors"}, "serialized_named_tensors"),
        ({"lora_name"}, None),
        (set(), None),
    ],
)
def test_where_an_adapters_tensors_go(fields, expected):
    given = answers("0.5.23")
    given["server_info"]["enable_lora"] = True
    card = {"id": "style", "parent": "/tmp/cpu_tiny/model"}
    given["models"]["data"].append(card)
    found = interpret(url="http://one:1", vocab_size=384, lora_fields=fields, **given)
    assert found.has_lora
    assert found.adapters == ("style",)
    assert found.lora_tensors_field == expected
    assert not understand(answers("0.5.23")).has_lora


def test_fields_of_a_route():
    schema = {"properties": {"a": {}, "b": {}}}
    direct = {"application/json": {"schema": schema}}
    named = {"application/json": {"schema": {"$ref": "#/components/schemas/S"}}}
    described = {
        "paths": {
            "/direct": {"post": {"requestBody": {"content": direct}}},
            "/named": {"post": {"requestBody": {"content": named}}},
            "/bare": {"post": {}},
        },
        "components": {"schemas": {"S": schema}},
    }
    assert fields_of(described, "/direct") == fields_of(described, "/named")
    assert fields_of(described, "/named") == {"a", "b"}
    assert fields_of(described, "/bare") == fields_of(described, "/none") == set()


def test_routes_and_not_versions_decide():
    given = answers("0.5.23")
    given["server_info"]["version"] = "0.4.0"
    assert understand(given).needs_update_session
    given["routes"] = {"/generate", "/get_load"}
    assert not understand(given).needs_update_session
    assert understand(given).load_route == "/get_load"
    given["routes"] = {"/generate"}
    with pytest.raises(UnsupportedByServerError, match="http://one:1.*/v1/loads"):
        understand(given)


def test_an_embedding_server():
    given = answers("0.5.23")
    given["model_info"]["is_generation"] = False
    with pytest.raises(UnsupportedByServerError, match="does not generate"):
        understand(given)


def test_no_key_is_kept():
    given = answers("0.5.23")
    given["server_info"].update(
        api_key="sesame",
        admin_api_key="sesame",
        launch_command="--model-path m --api-key sesame",
        internal_states=[{"api_key": "sesame"}],
    )
    found = understand(given)
    assert "sesame" not in str(dict(found.server_args))
    assert "server_args" not in repr(found)


def test_a_real_server(engine, tiny_model_path, hf_model):
    found = engine.capabilities
    assert found.version == "0.5.23"
    assert found.needs_update_session
    assert found.model_path == tiny_model_path
    assert found.vocab_size == hf_model.config.vocab_size
    assert found.max_context == hf_model.config.max_position_embeddings
    assert found.dtype is torch.float32
    assert not found.has_grammar


@pytest.mark.parametrize("path", ["/openapi.json", "/server_info", "/v1/models"])
@pytest.mark.parametrize("fault", ["error_500", "malformed_json", "hang_up"])
def test_a_server_that_is_broken(fake, path, fault):
    with (
        fake.misbehaving(fault, path),
        pytest.raises(ServerUnavailableError, match=f"{fake.url}{path}"),
    ):
        AsyncSGLang.connect(fake.url)


def test_a_web_server_of_another_kind(fake):
    with pytest.raises(ServerUnavailableError, match="not an SGLang server"):
        AsyncSGLang.connect(f"{fake.url}/elsewhere")


def test_a_server_that_generates_and_is_not_sglang(fake):
    fake.routes.pop("/server_info")
    with pytest.raises(
        UnsupportedByServerError, match="none of the routes /server_info"
    ):
        AsyncSGLang.connect(fake.url)


def test_a_server_whose_answers_make_no_sense(fake):
    fake.routes["/v1/models"] = fake.routes["/v1/loads"]
    with pytest.raises(ServerUnavailableError, match="not understood.*'data'"):
        AsyncSGLang.connect(fake.url)
    fake.routes.pop("/generate")
    with pytest.raises(ServerUnavailableError, match="no /generate"):
        AsyncSGLang.connect(fake.url)


def test_a_configuration_that_cannot_be_read(fake):
    with pytest.raises(ConfigurationError, match="'/no/such/folder'.*pass model=..."):
        AsyncSGLang.connect(fake.url, model="/no/such/folder")


def test_a_model_path_that_only_the_server_can_read(fake, tiny_model_path):
    fake.model_path = "/only/there"
    with pytest.raises(
        ConfigurationError, match="'/only/there' cannot be read from here"
    ):
        AsyncSGLang.connect(fake.url)
    with AsyncSGLang.connect(fake.url, model=tiny_model_path) as engine:
        assert engine.capabilities.model_path == "/only/there"
        assert engine.get_tokenizer().encode("a")
        assert "lm_head.weight" in engine.get_model_metadata()


@pytest.mark.parametrize(
    ("backend", "routes", "stale"),
    [("file", set(), True), ("file", {"/ready"}, False), (None, set(), False)],
)
def test_a_storage_that_finds_prefixes_of_older_weights(backend, routes, stale):
    given = answers("0.5.20")
    given["routes"] = given["routes"] | routes
    given["server_info"]["hicache_storage_backend"] = backend
    found = understand(given)
    assert found.stores_stale_prefixes == stale
    if not stale:
        check_takes_weights(found)
        return
    with pytest.raises(UnsupportedByServerError, match="prefixes of the old weights"):
        check_takes_weights(found)


def test_a_weight_update_there_is_refused_before_anything_is_sent(fake_engine, fake):
    known = fake_engine.capabilities
    fake_engine.capabilities = dataclasses.replace(
        known,
        stores_stale_prefixes=True,
        server_args={**known.server_args, "hicache_storage_backend": "file"},
    )
    sent = len(fake.requests)
    with (
        pytest.raises(UnsupportedByServerError, match="hicache_storage_backend='file'"),
        fake_engine.weight_update(),
    ):
        pass
    assert len(fake.requests) == sent
    assert fake_engine.generate(input_ids=[5])

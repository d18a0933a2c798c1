"""vLLM's protocol in front of SGLang: routes, errors and weight updates."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from helpers.fake_server import FakeServer
from helpers.log_probs import PROMPT, TOLERANCE, score
from helpers.vllm_trainer import SECONDS, Trainer
from helpers.waiting import wait_until
from transformers import AutoTokenizer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.errors import ConfigurationError, WeightTransferError
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.vllm.answers import routed_experts
from torchrl_sglang.gateway.vllm.broadcasts import (
    LOADER,
    BroadcastReceiver,
    Wire,
    read_specs,
)
from torchrl_sglang.gateway.vllm.dialect import VLLM
from torchrl_sglang.requests.token_columns import ROUTED_EXPERTS
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.types import Completion, TokenLayout, TokenValues
from torchrl_sglang.weight_update.transports.traced import TracedLoader

GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def models(tiny_model_path) -> dict[str, Any]:
    """Weight version -> Hugging Face's model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    return {"default": make_tiny_model(tokenizer)}


GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 3,
}


@pytest.fixture(scope="module")
def vllm_engine(tiny_model_path) -> Iterator[AsyncSGLang]:
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        num_replicas=2,
        router_policy=None,
        weight_loader="traced",
        custom_weight_loader=[LOADER],
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(vllm_engine) -> Iterator[Gateway]:
    dialects = [VLLM(vllm_engine)]
    with Gateway(vllm_engine, dialects=dialects, sessionless=True) as gateway:
        yield gateway


@pytest.fixture
def client(gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def trainer(gateway) -> Iterator[Trainer]:
    trainer = Trainer(gateway.url)
    yield trainer
    trainer.close()


def generate(client, **more) -> dict[str, Any]:
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, **more}
    response = client.post(GENERATE, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def check(choice, models, prompt=PROMPT) -> None:
    """Compares a choice's log-probs with those of its tokens' versions."""
    ids = choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [row["token"] for row in content] == [f"token_id:{token}" for token in ids]
    found = torch.tensor([row["logprob"] for row in content])
    spans = choice["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(s["end"] for s in spans[:-1])]
    assert spans[-1]["end"] == len(ids)
    for span in spans:
        expected = score(models[span["version"]], [*prompt, *ids])[len(prompt) :]
        place = slice(span["start"], span["end"])
        torch.testing.assert_close(
            found[place], expected[place], atol=TOLERANCE, rtol=0
        )


def test_tokens_in_tokens_out(client, vllm_engine, models):
    sampling = {**SAMPLING, "prompt_logprobs": 0, "n": 2, "top_k": 0, "seed": 7}
    answer = generate(
        client, sampling_params=sampling, return_token_ids=True, request_id="mine"
    )
    version = {vllm_engine.weight_version: models["default"]}
    assert answer["request_id"] == "mine"
    assert answer["prompt_token_ids"] == PROMPT
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        check(choice, {**models, **version})
        assert all(
            len(row["top_logprobs"]) == 1 for row in choice["logprobs"]["content"]
        )
    first, *rows = answer["prompt_logprobs"]
    assert first is None
    expected = score(models["default"], PROMPT)[1:]
    found = [
        row[str(token)]["logprob"] for token, row in zip(PROMPT[1:], rows, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)
    assert answer["usage"]["completion_tokens"] == 16


def test_openai_s_requests_with_vllm_s_fields(client):
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "ignore_eos": True,
        "top_k": 0,
        "logprobs": 0,
        "n": 1,
        "return_token_ids": True,
        "seed": 2**62,
        "repetition_penalty": 1.0,
    }
    response = client.post("/v1/completions", json=body)
    assert response.headers["x-torchrl-sglang-ignored"] == "seed"
    (choice,) = response.json()["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4
    text = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    chat = {**text, "return_token_ids": True, "prompt_logprobs": 0}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"])
    assert answer["choices"][0]["token_ids"]


def test_likeliest_tokens_of_completions_are_beside_the_sampled_one(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    tops = list(map(list, map(dict.values, logprobs["top_logprobs"])))
    assert [top[0] for top in tops] == logprobs["token_logprobs"]
    others = [top for top in tops if len(top) > 1]
    # The model is nearly uniform.
    assert others
    assert all(sampled < likeliest for sampled, likeliest in others)


def test_a_model_may_be_named_as_in_the_command_that_serves_it(
    client, vllm_engine, monkeypatch
):
    monkeypatch.chdir(Path(vllm_engine.model_path).parent)
    body = {"prompt": PROMPT, "max_tokens": 1}
    name = f"./{Path(vllm_engine.model_path).name}"
    for model, status in ((name, 200), (f"{name}-2", 404)):
        response = client.post("/v1/completions", json={**body, "model": model})
        assert response.status_code == status, response.text


def test_a_stream(client):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "stream": True}
    events = client.post(GENERATE, json=body).text.split("\n\n")
    tokens, end = (event for event in events if event.startswith("data: "))
    assert '"token_ids"' in tokens
    assert end == "data: [DONE]"


def test_an_end_of_the_model_is_no_stop_reason(client):
    body = {"prompt": PROMPT, "max_tokens": 4, "logit_bias": {"2": 1e4}}
    for more, reason in (({}, None), ({"stop_token_ids": [2]}, 2)):
        answer = client.post("/v1/completions", json={**body, **more}).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_a_pause_by_another_client_of_the_engine_outlasts_an_update(
    client, vllm_engine, trainer, models, tiny_model_path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    model = make_tiny_model(tokenizer, seed=13)
    trainer.join()
    with (
        Gateway(vllm_engine, dialects=[VLLM(vllm_engine)], sessionless=True) as other,
        httpx.Client(base_url=other.url, timeout=SECONDS) as another,
    ):
        another.post("/pause", params={"mode": "keep"})
        trainer.update(model, pauses=False)
        assert client.get("/is_paused").json() == {"is_paused": True}
        another.post("/resume")
    models[client.get("/weight_info").json()["weight_version"]] = model
    check(generate(client)["choices"][0], models)


def test_weights_of_a_trainer_while_requests_run(
    client, trainer, models, tiny_model_path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    trainer.join()
    choices: list[Any] = []
    ended = threading.Event()

    def talk() -> None:
        long = {**SAMPLING, "max_tokens": 64}
        while not ended.is_set():
            choices.extend(generate(client, sampling_params=long)["choices"])

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 6):
            model = make_tiny_model(tokenizer, seed=number)
            trainer.update(model, parts=1 + number % 2)
            models[client.get("/weight_info").json()["weight_version"]] = model
    finally:
        ended.set()
        for thread in threads:
            thread.join(SECONDS)
    choices += generate(client)["choices"]
    assert choices[-1]["weight_version"] == max(models.keys() - {"default"}, key=int)
    for choice in choices:
        check(choice, models)


def test_pauses(client):
    assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(generate(client)))
    thread.start()
    thread.join(1.0)
    assert not done
    assert client.post("/resume").json() == {"status": "resumed"}
    thread.join(SECONDS)
    assert done[0]["choices"][0]["finish_reason"] == "length"
    assert client.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
    client.post("/resume")
    thread = threading.Thread(
        target=lambda: done.append(
            generate(client, sampling_params={**SAMPLING, "max_tokens": 20_000})
        )
    )
    thread.start()
    while not client.post("/abort_requests", json={}).json()["aborted"]:
        pass
    thread.join(SECONDS)
    assert done[1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (GENERATE, {"token_ids": PROMPT}, 400, "sampling_params"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
        (GENERATE, {"features": {"a": 1}, "sampling_params": {}}, 400, "features"),
        (
            "/v1/completions",
            {"prompt": PROMPT, "model": "x"},
            404,
            "`x` does not exist",
        ),
        ("/v1/completions", {"prompt": PROMPT, "bad_words": ["a"]}, 400, "bad_words"),
        ("/v1/completions", {"prompt": PROMPT, "priority": 2}, 400, "Priority"),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 3}, 400, "give 0"),
        ("/v1/completions", {"prompt": PROMPT, "temperatures": 3}, 400, "temperature"),
        ("/pause?mode=now", None, 400, "abort"),
        ("/sleep?level=7", None, 400, "level"),
        ("/sleep?level=1", None, 400, "enable-weights-cpu-backup"),
        ("/init_weight_transfer_engine", {}, 400, "Missing 'init_info'"),
        ("/init_weight_transfer_engine", {"init_info": {}}, 400, "master_address"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {**GROUP, "rank_offset": "1"}},
            400,
            "rank_offset='1'",
        ),
        ("/update_weights", {}, 400, "Missing 'update_info'"),
        ("/finish_weight_update", {}, 500, "without a matching start_weight_update"),
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, "checkpoint"),
        ("/collective_rpc", {}, 501, "no functions"),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, 404, "cannot be found"),
        ("/is_paused", {}, 405, "GET /is_paused"),
    ],
)
def test_refusals_in_vllm_s_words(client, path, body, status, words):
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert words in error["message"]
    if status == 405:
        assert error["type"] == "Method Not Allowed"


def test_nccl_that_cannot_join_names_the_setting(client, monkeypatch):
    async def execute(*_):
        pass

    async def check(_):
        raise WeightTransferError(
            "The server at x did not load the weights: RuntimeError: NCCL error: "
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)."
        )

    monkeypatch.setattr(BroadcastReceiver, "_execute", execute)
    monkeypatch.setattr(TracedLoader, "check", check)
    body = {"init_info": GROUP}
    response = client.post("/init_weight_transfer_engine", json=body)
    assert response.status_code == 503
    assert "Both sides need the same NCCL_CUMEM_ENABLE" in response.text


def test_phases_out_of_order(client, trainer):
    lists = {"names": [], "dtype_names": [], "shapes": []}
    response = trainer.call("/update_weights", {"update_info": lists})
    assert "start_weight_update must be called before" in response.text
    trainer.join()
    trainer.ok("/start_weight_update")
    assert "already active" in trainer.call("/start_weight_update").text
    wrong = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    assert (
        "no parameter" in trainer.call("/update_weights", {"update_info": wrong}).text
    )
    response = trainer.call("/finish_weight_update")
    assert "nothing was sent" in response.text
    # The servers hold the old weights, and generate with them.
    assert generate(client)["choices"]


def test_announcements_of_a_trainer():
    info = {
        "names": ["a", "b", "c"],
        "dtype_names": ["float32", "bfloat16", "float32"],
        "shapes": [[2], [3], [1]],
    }
    assert [spec.num_bytes for spec in read_specs(info)] == [8, 6, 4]
    wire = Wire.read({"packed": True, "packed_buffer_size_bytes": None})
    assert wire == Wire(packed=True, buffer_bytes=1 << 30)
    assert not wire.changed({"packed": False}).packed
    for wrong, words in (
        ({"shapes": []}, "same size as `names`"),
        ({"shapes": [[-2], [3], [1]]}, "no list of sizes"),
        ({"dtype_names": ["float33"] * 3}, "float33"),
        ({"ipc_handles_pickled": ""}, "ipc_handles_pickled"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            read_specs({**info, **wrong})
    with pytest.raises(ConfigurationError, match="packed must be a bool"):
        Wire.read({"packed": "false"})


def test_a_session_records_a_trainer_s_requests(vllm_engine):
    with Gateway(vllm_engine, dialects=[VLLM(vllm_engine)]) as gateway:
        session = gateway.session()
        with httpx.Client(base_url=session.url, timeout=SECONDS) as client:
            (first,) = generate(client)["choices"]
            longer = [*PROMPT, *first["token_ids"], 5]
            generate(client, token_ids=longer)
            assert client.get("/get_world_size").json() == {"world_size": 2}
            one = client.get("/get_world_size", params={"include_dp": False})
            assert one.json() == {"world_size": 1}
            assert client.get("/health").status_code == 200
        (row,) = gateway.to_tensordict([session])
        assert row["tokens", "full"][: len(longer)].tolist() == longer
        assert httpx.post(f"{gateway.url}{GENERATE}", json={}).status_code == 401


def test_a_key_opens_routes_without_a_session(vllm_engine):
    dialects = [VLLM(vllm_engine)]
    with Gateway(
        vllm_engine, dialects=dialects, sessionless=True, api_key="secret"
    ) as gateway:
        assert httpx.post(f"{gateway.url}/pause").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=gateway.url, headers=headers) as client:
            assert generate(client)["choices"]
            assert client.get("/is_paused").json() == {"is_paused": False}


def test_sampling_masks(vllm_engine):
    dialects = [VLLM(vllm_engine)]
    with (
        Gateway(
            vllm_engine, dialects=dialects, sessionless=True, logprobs_mode="behaviour"
        ) as gateway,
        httpx.Client(base_url=gateway.url, timeout=SECONDS) as client,
    ):
        sampling = {**SAMPLING, "top_k": 5}
        (choice,) = generate(client, sampling_params=sampling)["choices"]
        pairs = zip(choice["token_ids"], choice["sampling_mask"], strict=True)
        assert all(token in mask and len(mask) == 5 for token, mask in pairs)


def test_routed_experts_have_vllm_s_form():
    layout = TokenLayout(name=ROUTED_EXPERTS, dtype="uint8", shape=(2, 3))
    values = np.arange(30, dtype="uint8").reshape(5, 2, 3)
    done = Completion(
        token_ids=[1, 2],
        finish_reason="stop",
        columns={ROUTED_EXPERTS: TokenValues(layout=layout, values=values[3:])},
        prompt_columns={ROUTED_EXPERTS: TokenValues(layout=layout, values=values[:3])},
    )
    sent = np.load(io.BytesIO(base64.b64decode(routed_experts(done, 1))))
    assert np.array_equal(sent, values[1:-1])


@pytest.mark.parametrize("pauses", [True, False])
def test_a_broken_transfer_generates_nothing(
    client, trainer, models, tiny_model_path, pauses
):
    """Until a whole update, after which servers are paused only if they were."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    model = make_tiny_model(tokenizer, seed=11)
    trainer.join()
    if pauses:
        trainer.ok("/pause", mode="keep")
    trainer.ok("/start_weight_update")
    trainer.leave()
    name, value = next(model.named_parameters())
    info = {"names": [name], "dtype_names": ["float32"], "shapes": [list(value.shape)]}
    response = trainer.call("/update_weights", {"update_info": info})
    assert response.status_code == 503
    assert "stay paused" in response.text
    assert "mix of old and new" in trainer.call("/resume").text
    assert "not initialized" in trainer.call("/start_weight_update").text
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
    assert client.post(GENERATE, json=body).status_code == 503
    trainer.join()
    trainer.ok("/start_weight_update")
    trainer.send([(name, value.detach())])
    assert "send all weights" in trainer.call("/finish_weight_update").text
    trainer.update(model, pauses=pauses)
    models[client.get("/weight_info").json()["weight_version"]] = model
    check(generate(client)["choices"][0], models)


def test_an_abandoned_update_ends_when_a_trainer_joins(
    client, trainer, models, tiny_model_path
):
    """It is no whole update, so nothing is generated before the next one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    model = make_tiny_model(tokenizer, seed=12)
    trainer.join()
    trainer.ok("/start_weight_update")
    trainer.send([(name, value.detach()) for name, value in model.named_parameters()])
    trainer.leave()
    trainer.join()
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
    assert client.post(GENERATE, json=body).status_code == 503
    trainer.update(model, pauses=False)
    models[client.get("/weight_info").json()["weight_version"]] = model
    check(generate(client)["choices"][0], models)


def test_level_0_stops_the_scheduler_alone(client):
    assert client.post("/sleep", params={"level": 0}).status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up", params={"tags": "scheduling"}).status_code == 200
    assert generate(client)["choices"]


@contextmanager
def in_front_of(fake) -> Iterator[httpx.Client]:
    with (
        AsyncSGLang.connect(fake.url) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
        httpx.Client(base_url=gateway.url, timeout=SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def fake_client(tiny_model_path) -> Iterator[httpx.Client]:
    with FakeServer(tiny_model_path) as fake, in_front_of(fake) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_server(tiny_model_path, stream):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "stream": stream}

    async def hang_up(url):
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
            ask = asyncio.ensure_future(client.post(GENERATE, json=body))
            await asyncio.to_thread(fake.wait_for, "/generate")
            ask.cancel()
            await asyncio.wait([ask])

    with (
        FakeServer(tiny_model_path) as fake,
        AsyncSGLang.connect(fake.url) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
    ):
        with fake.misbehaving("hang"):
            asyncio.run(hang_up(gateway.url))
            fake.wait_for("/abort_request")
            fake.recover()
        ((sent,), (aborted,)) = fake.payloads(), fake.payloads("/abort_request")
        assert sent["rid"] == [aborted["rid"]]
        wait_until(lambda: engine.stats().in_flight == engine.stats().queued == 0)
        assert httpx.post(gateway.url + GENERATE, json=body).status_code == 200


def test_shutdown_ends_requests_before_it_returns(tiny_model_path):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
    with (
        FakeServer(tiny_model_path) as fake,
        AsyncSGLang.connect(fake.url) as engine,
        ThreadPoolExecutor() as clients,
        fake.misbehaving("hang"),
    ):
        with Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway:
            answer = clients.submit(httpx.post, gateway.url + GENERATE, json=body)
            fake.wait_for("/generate")
        assert engine.stats().in_flight == engine.stats().queued == 0
        with pytest.raises(httpx.HTTPError):
            answer.result(SECONDS)


def test_sleep(tiny_model_path):
    with (
        FakeServer(tiny_model_path, enable_memory_saver=True) as fake,
        in_front_of(fake) as client,
    ):
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        client.post("/wake_up", params={"tags": "weights"})
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        client.post("/wake_up")
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        # The weights are lost until the trainer sends them.
        body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
        assert client.post(GENERATE, json=body).status_code == 503


def test_a_wake_up_ends_a_pause(tiny_model_path):
    with (
        FakeServer(tiny_model_path, enable_memory_saver=True) as fake,
        in_front_of(fake) as client,
    ):
        for calls in (["/pause"], ["/pause", "/sleep?level=2"]):
            for call in calls:
                assert client.post(call).status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            client.post("/wake_up")
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            # Lost weights generate nothing until they come.
            is_paused = len(calls) > 1
            assert client.get("/is_paused").json() == {"is_paused": is_paused}


CHAT = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": [PROMPT], "add_special_tokens": False}, None),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": True}, None),
        ("/v1/completions", {"prompt": "a", "best_of": 1, "suffix": None}, None),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": -1}, None),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 0}, "budget"),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}, "special"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 21}, "^logprobs=21"),
        ("/v1/completions", {"prompt": [PROMPT, "a"], "stream": True}, "^stream"),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True}, "^echo"),
        ("/v1/completions", {"prompt": [PROMPT, []]}, "^prompt"),
        ("/v1/completions", {"prompt": [[PROMPT]]}, "^prompt"),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
                "include_reasoning": True,
                "echo": False,
                "max_completion_tokens": 2,
            },
            None,
        ),
        ("/v1/chat/completions", {**CHAT, "add_generation_prompt": False}, "template"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 3}, "give one"),
        (GENERATE, {"output_mode": "text"}, "output_mode"),
        (GENERATE, {"output_mode": "tokens"}, None),
    ],
)
def test_defaults_of_vllm_are_accepted(fake_client, path, body, words):
    """Other values are refused, if SGLang cannot serve them."""
    if path == GENERATE:
        body = {"token_ids": PROMPT, "sampling_params": SAMPLING, **body}
    response = fake_client.post(path, json=body)
    assert response.status_code == (400 if words else 200), response.text
    if words:
        assert re.search(words, response.json()["error"]["message"])


def test_choices_of_several_prompts_come_in_the_order_of_the_prompts(fake_client):
    def ask(prompt, n):
        body = {"prompt": prompt, "n": n, "max_tokens": 3, "prompt_logprobs": 0}
        body |= {"return_token_ids": True, "logprobs": 0}
        return fake_client.post("/v1/completions", json=body).json()

    answer = ask([[5, 6, 7], [8, 9]], 2)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    expected = [[5, 6, 7], [5, 6, 7], [8, 9, 8], [8, 9, 8]]
    assert [choice["token_ids"] for choice in choices] == expected
    prompts = [choice["prompt_token_ids"] for choice in choices]
    assert prompts == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    alone = [ask(text, 1)["choices"][0] for text in ("abc", "b")]
    together = ask(["abc", "b"], 1)["choices"]
    assert together == [{**choice, "index": i} for i, choice in enumerate(alone)]


def test_several_prompts_are_recorded_together_or_not_at_all(tiny_model_path):
    body = {"prompt": [[5, 6], [8, 9]], "max_tokens": 2}
    with (
        FakeServer(tiny_model_path) as fake,
        AsyncSGLang.connect(fake.url) as engine,
        Gateway(engine, dialects=[VLLM(engine)], request_timeout=3.0) as gateway,
        ThreadPoolExecutor() as clients,
    ):
        session = gateway.session()
        path = f"{session.base_url}/completions"
        with fake.misbehaving("hang", when=lambda content: 9 in content["input_ids"]):
            answer = clients.submit(httpx.post, path, json=body, timeout=SECONDS)
            wait_until(lambda: len(session.turns) == 1)
            assert answer.result().status_code == 504
            assert not session.turns
        assert httpx.post(path, json=body, timeout=SECONDS).status_code == 200
        assert len(session.turns) == 2


@pytest.mark.parametrize("path", [GENERATE, "/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_prompt_s_tokens(fake_client, path):
    about = {"stream": True, "return_token_ids": True}
    bodies = {
        GENERATE: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": CHAT,
    }
    text = fake_client.post(path, json={**bodies[path], **about}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    parts = [*events, *(choice for event in events for choice in event["choices"])]
    prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
    expected = PROMPT
    if path == "/v1/chat/completions":
        answer = fake_client.post(path, json={**CHAT, "return_token_ids": True})
        expected = answer.json()["prompt_token_ids"]
    assert prompts[0] == expected
    assert [i for part in parts for i in part.get("token_ids") or ()] == expected[:2]


def test_answers_have_vllm_s_names(tiny_model_path, fake_client):
    body = {"prompt": "abc", "max_tokens": 2, "logprobs": 0}
    answer = fake_client.post("/v1/completions", json=body).json()
    assert answer["model"] == str(tiny_model_path)
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    sent = {"token_ids": PROMPT, "sampling_params": SAMPLING}
    answer = fake_client.post(GENERATE, json=sent).json()
    assert answer["model"] == str(tiny_model_path)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_vllm_s_name(tiny_model_path, stream):
    content = "<think>why</think>so"
    messages = [{"role": "user", "content": content}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        FakeServer(tiny_model_path) as fake,
        AsyncSGLang.connect(fake.url) as engine,
        Gateway(
            engine,
            dialects=[VLLM(engine)],
            sessionless=True,
            chat_template=template,
            reasoning_parser="qwen3",
        ) as gateway,
    ):
        body = {"messages": messages, "max_tokens": len(content), "stream": stream}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).text
    assert '"reasoning":"why"' in answer
    assert '"reasoning_content":"why"' in answer


def test_adapters_are_models(tiny_model_path, tmp_path):
    peft = pytest.importorskip("peft")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(make_tiny_model(tokenizer), config).save_pretrained(tmp_path)
    named = {"lora_name": "policy-v1", "lora_path": str(tmp_path)}
    body = {"model": "policy-v1", "token_ids": PROMPT, "sampling_params": SAMPLING}
    with (
        FakeServer(tiny_model_path, enable_lora=True) as fake,
        in_front_of(fake) as client,
    ):
        assert client.post(GENERATE, json=body).status_code == 404
        response = client.post("/v1/load_lora_adapter", json=named)
        assert (response.status_code, "Success" in response.text) == (200, True)
        again = client.post("/v1/load_lora_adapter", json=named)
        assert "already been loaded" in again.text
        assert client.post(GENERATE, json=body).status_code == 200
        config = client.get("/server_info", params={"config_format": "json"}).json()
        assert config["vllm_config"]["lora_config"]["max_loras"] > 0
        client.post("/v1/unload_lora_adapter", json=named)
        assert client.post(GENERATE, json=body).status_code == 404

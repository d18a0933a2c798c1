"""The fake server is worth something only where it does what SGLang does."""

from __future__ import annotations

import math

import pytest

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import ServerUnavailableError
from torchrl_sglang.support.event_loop import run_sync

ONE = {"max_new_tokens": 2, "ignore_eos": True}


@pytest.fixture
def client():
    client = HttpClient()
    yield client
    run_sync(client.close())


def post(client, server_url, payload, path="/generate"):
    return run_sync(client.request("POST", server_url + path, payload, timeout=30))


def request(**changes):
    payload = {"input_ids": [5, 6, 7], "sampling_params": ONE, **changes}
    return {name: value for name, value in payload.items() if value is not ...}


def params(**changes):
    return request(sampling_params={**ONE, **changes})


REQUESTS = {
    "plain": request(),
    "batch": request(input_ids=[[5], [6, 7]], extra_key=["a", "b"]),
    "batch of one": request(input_ids=[[5]], sampling_params=[ONE]),
    "scoring": request(sampling_params={"max_new_tokens": 0}, return_logprob=True),
    "log-probs": request(return_logprob=True, logprob_start_len=0),
    "some log-probs": request(return_logprob=True, logprob_start_len=1),
    "unknown field": request(wibble=1),
    "longest": request(input_ids=[5] * 2041),
    "most": request(
        input_ids=[5] * 2000, sampling_params={**ONE, "max_new_tokens": 48}
    ),
    "no prompt": request(input_ids=...),
    "text for tokens": request(input_ids="x"),
    "empty": request(input_ids=[]),
    "floats": request(input_ids=[5, 1.5]),
    "floats in a batch": request(input_ids=[[5, 1.5]]),
    "booleans": request(input_ids=[[5, True]]),
    "too long": request(input_ids=[5] * 3000),
    "too long for the scheduler": request(input_ids=[5] * 2042),
    "too many": request(input_ids=[5] * 2000, sampling_params={"max_new_tokens": 49}),
    "start": request(return_logprob=True, logprob_start_len=9),
    "keys": request(input_ids=[[5], [6]], extra_key=["a"]),
    "key": request(extra_key=5),
    "unknown parameter": params(wibble=1),
    "temperature": params(temperature=-1),
    "type": params(temperature="x"),
    "top_p": params(top_p=1.5),
    "min > max": params(min_new_tokens=3),
    "stop": params(stop=[1]),
    "33 stops": params(stop=[f"s{i}" for i in range(33)]),
    "null bias": params(logit_bias={"5": None}),
    "a list": [1],
}


@pytest.mark.parametrize("case", REQUESTS)
def test_it_answers_and_refuses_as_the_real_one(engine, fake, client, case):
    real = post(client, engine.server_url, REQUESTS[case])
    ours = post(client, fake.url, REQUESTS[case])
    assert ours.status == real.status
    if not real.ok:
        assert ours.error_text()
        return
    for our, their in zip(as_list(ours.json()), as_list(real.json()), strict=True):
        assert set(our) <= set(their)
        assert set(our["meta_info"]) <= set(their["meta_info"])
        for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
            assert our["meta_info"][name] == their["meta_info"][name]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            lengths = [len(meta["meta_info"].get(name, ())) for meta in (our, their)]
            assert lengths[0] == lengths[1]
        assert len(our["output_ids"]) == len(their["output_ids"])


def as_list(content):
    return content if isinstance(content, list) else [content]


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/v1/models"])
def test_it_says_what_the_real_one_says(engine, fake, client, path, tiny_model_path):
    real, ours = (
        run_sync(client.request("GET", url + path, timeout=30)).json()
        for url in (engine.server_url, fake.url)
    )
    if path == "/v1/models":
        real, ours = real["data"][0], ours["data"][0]
    # Both change when a test sends weights as a checkpoint.
    for changing in ("weight_version", "model_path", "id", "root"):
        assert type(ours.pop(changing, "")) is str
    # Each start takes its own time, in the same form.
    assert set(ours.pop("startup_time", {})) <= set(real.get("startup_time") or {})
    assert ours == {name: real[name] for name in ours}


def test_its_routes_are_real(engine, fake, client):
    real, ours = (
        run_sync(client.request("GET", f"{url}/openapi.json", timeout=30)).json()[
            "paths"
        ]
        for url in (engine.server_url, fake.url)
    )
    assert set(ours) <= set(real)


def test_sessions_as_on_the_real_one(engine, fake, client):
    for path in ("begin", "begin", "end", "end"):
        real, ours = (
            post(client, url, {}, f"/{path}_weight_update")
            for url in (engine.server_url, fake.url)
        )
        assert (ours.status, ours.json()) == (real.status, real.json())


@pytest.mark.parametrize(
    "payload",
    [
        request(input_ids=[[]]),
        request(input_ids=[10**6]),
        request(input_ids=[-1]),
        params(top_k=2**40),
    ],
    ids=["empty row", "outside", "negative", "top_k"],
)
def test_it_dies_of_what_kills_the_real_one(fake, client, payload):
    for sent in (payload, request()):
        with pytest.raises(ServerUnavailableError, match="Disconnected"):
            post(client, fake.url, sent)


def test_its_answers(fake_engine):
    (answer,) = fake_engine.generate(
        input_ids=[5, 6],
        sampling_params={"max_new_tokens": 3},
        return_logprobs=True,
        return_prompt_logprobs=True,
    )
    assert answer.token_ids == [5, 6, 5]
    assert answer.log_probs == [-1.5] * 3
    assert math.isnan(answer.prompt_log_probs[0])
    assert answer.prompt_log_probs[1:] == [-1.5]


def test_waiting_for_requests(fake, client):
    post(client, fake.url, request())
    fake.wait_for("/generate")
    with pytest.raises(TimeoutError, match="2 requests to /generate"):
        fake.wait_for("/generate", count=2, timeout=0.01)


def test_hanging_requests_end_with_the_server(tiny_model_path, client):
    from helpers.fake_server import FakeServer

    from torchrl_sglang.support.event_loop import submit

    with FakeServer(tiny_model_path) as fake, fake.misbehaving("hang"):
        call = submit(
            client.request("POST", f"{fake.url}/generate", request(), timeout=30)
        )
        fake.wait_for("/generate")
    with pytest.raises(ServerUnavailableError):
        call.result(60)

"""The engine as its users hold it, on a real server wherever one can show it."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import requests
import torch
from helpers.engines import with_capabilities
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS
from torchrl_sglang.support.event_loop import run_sync, submit

TOLERANCE = 1e-4
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
FOUR = {"max_new_tokens": 4, "ignore_eos": True}
LONG = {"max_new_tokens": 2000, "ignore_eos": True}


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    random = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=random).tolist()
    return [
        torch.randint(0, 90, (length,), generator=random).tolist() for length in lengths
    ]


def assert_scores(answer, prompt, score, what="") -> None:
    """The log-probs are those of this prompt and this response, in this order."""
    expected = score([*prompt, *answer.token_ids])
    found = torch.tensor([*answer.prompt_log_probs, *answer.log_probs])
    assert math.isnan(found[0]), what
    torch.testing.assert_close(found[1:], expected[1:], atol=TOLERANCE, rtol=0)


def generate(engine, input_ids, params=FOUR, **options):
    return engine.generate(
        input_ids=input_ids,
        sampling_params=params,
        return_logprobs=True,
        return_prompt_logprobs=True,
        **options,
    )


def wait_until_idle(engine) -> None:
    deadline = time.monotonic() + 30
    while run_sync(engine.control.running_requests()):
        assert time.monotonic() < deadline, "The server goes on computing."


# --- what it generates


def test_log_probs_equal_hugging_face(engine, score):
    batch = prompts(8)
    for prompt, answer in zip(batch, generate(engine, batch), strict=True):
        assert len(answer.token_ids) == len(answer.log_probs) == 4
        assert answer.finish_reason == "length"
        assert_scores(answer, prompt, score)


def test_greedy_tokens_equal_hugging_face(engine, hf_model):
    (prompt,) = prompts(1)
    (answer,) = generate(engine, [prompt], GREEDY)
    ids = list(prompt)
    for token in answer.token_ids:
        with torch.no_grad():
            assert token == int(hf_model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_log_probs_are_the_models_at_any_temperature(engine, score):
    (answer,) = generate(engine, [[5, 6, 7]], {**FOUR, "temperature": 0.5})
    assert_scores(answer, [5, 6, 7], score)


def test_scoring_alone(engine, score):
    batch = prompts(3)
    answers = engine.generate(
        input_ids=batch,
        sampling_params={"max_new_tokens": 0},
        return_prompt_logprobs=True,
    )
    for prompt, answer in zip(batch, answers, strict=True):
        assert (answer.token_ids, answer.log_probs) == ([], None)
        found = torch.tensor(answer.prompt_log_probs[1:])
        torch.testing.assert_close(found, score(prompt)[1:], atol=TOLERANCE, rtol=0)


def test_the_last_token_of_the_vocabulary(engine, score):
    """The server writes it as 0 beside its log-probability."""
    last = engine.capabilities.vocab_size - 1
    forced = {**FOUR, "logit_bias": {last: 1e4}}
    (answer,) = engine.generate(
        input_ids=[5, last], sampling_params=forced, return_logprobs=True
    )
    assert answer.token_ids == [last] * 4
    (answer,) = generate(engine, [[5, last, last]])
    assert_scores(answer, [5, last, last], score)


def test_log_probs_come_only_if_asked_for(engine):
    (answer,) = engine.generate(input_ids=[5], sampling_params=FOUR)
    assert (answer.log_probs, answer.prompt_log_probs) == (None, None)
    (answer,) = engine.generate(
        input_ids=[5], sampling_params=FOUR, return_prompt_logprobs=True
    )
    assert answer.log_probs is None
    assert len(answer.prompt_log_probs) == 1


def test_stops(engine):
    (free,) = generate(engine, [[5, 6]], GREEDY)
    stop = free.token_ids[2]
    end = free.token_ids.index(stop) + 1
    stopping = {"temperature": 0.0, "max_new_tokens": 6, "stop_token_ids": [stop]}
    (answer,) = generate(engine, [[5, 6]], stopping)
    assert answer.token_ids == free.token_ids[:end]
    assert len(answer.log_probs) == end
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    text = engine.get_tokenizer().decode([stop])
    (answer,) = generate(engine, [[5, 6]], {**GREEDY, "stop": text})
    assert answer.token_ids == free.token_ids[: len(answer.log_probs)]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", text)
    assert free.text == engine.get_tokenizer().decode(free.token_ids)


def test_each_prompt_has_parameters_of_its_own(engine):
    params = [{"max_new_tokens": count, "ignore_eos": True} for count in (3, 1, 0, 2)]
    answers = engine.generate(input_ids=prompts(4), sampling_params=params)
    assert [len(answer.token_ids) for answer in answers] == [3, 1, 0, 2]


def test_texts_are_tokenised_here(engine, tokenizer):
    texts = ["2 + 2 =", "x"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [answer.token_ids for answer in generate(engine, ids, GREEDY)]
    for given in (texts, tuple(texts)):
        answers = engine.generate(given, sampling_params=GREEDY)
        assert [answer.token_ids for answer in answers] == expected
    (answer,) = engine.generate(texts[0], sampling_params=GREEDY)
    assert answer.token_ids == expected[0]


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6],
        (5, 6),
        [[5, 6]],
        [(5, 6)],
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        [torch.tensor([5, 6])],
        np.array([5, 6]),
        [np.array([5, 6])],
        [np.int64(5), np.int64(6)],
        [[np.int64(5), 6]],
    ],
    ids=repr,
)
def test_forms_of_token_ids(fake_engine, fake, ids):
    (answer,) = fake_engine.generate(input_ids=ids, sampling_params=FOUR)
    assert answer.token_ids == [5, 6, 5, 6]
    assert fake.payloads()[-1]["input_ids"] == [[5, 6]]


ENTRIES = {
    "generate": lambda engine, prompts: engine.generate(prompts, FOUR),
    "agenerate": lambda engine, prompts: asyncio.run(engine.agenerate(prompts, FOUR)),
    "generate_iter": lambda engine, prompts: [
        answer for _, answer in sorted(engine.generate_iter(prompts, FOUR))
    ],
}
EVERY_ENTRY = pytest.mark.parametrize("entry", ENTRIES)


@EVERY_ENTRY
@pytest.mark.parametrize(
    "ids", [[5, 6], (5, 6), np.array([5, 6]), [np.int64(5), 6], torch.tensor([5, 6])]
)
def test_prompts_of_vllm_are_read(fake_engine, fake, tokenizer, entry, ids):
    ask, text = partial(ENTRIES[entry], fake_engine), "Hi"
    hi = tokenizer(text)["input_ids"]
    for prompts, sent in (
        ({"prompt_token_ids": ids}, [[5, 6]]),
        ({"prompt": text}, [hi]),
        # vLLM's mapping of ids may say their text.
        ({"prompt_token_ids": ids, "prompt": text}, [[5, 6]]),
        ([{"prompt": text}, {"prompt_token_ids": ids}, text], [hi, [5, 6], hi]),
    ):
        count = len(fake.payloads())
        assert len(ask(prompts)) == len(sent)
        found = [each["input_ids"][0] for each in fake.payloads()[count:]]
        assert sorted(found) == sorted(sent)


@EVERY_ENTRY
@pytest.mark.parametrize(
    "prompt",
    [
        {"role": "user", "content": "Hi"},
        {"prompt_embeds": [1.0]},
        {"prompt": "Hi", "multi_modal_data": {"image": 1}},
        {"prompt": 5},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": ["Hi"]},
        {},
        MappingProxyType({"text": "Hi"}),
    ],
)
def test_other_mappings_are_refused(fake_engine, fake, entry, prompt):
    for prompts in (prompt, ["Hi", prompt]):
        with pytest.raises(ConfigurationError, match="Prompt [01] of the batch"):
            ENTRIES[entry](fake_engine, prompts)
    assert not fake.payloads()


@EVERY_ENTRY
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prompt_token_ids", "give input_ids"),
        ("lora_request", "give adapter"),
        ("use_tqdm", "leave it out"),
        ("actor_index", "chooses the server"),
        ("timeout_seconds", "give timeout"),
    ],
)
def test_arguments_of_vllm_are_refused_with_ours(fake_engine, entry, name, words):
    call = partial(getattr(fake_engine, entry), "Hi", **{name: 1, "max_new_tokens": 1})
    run = (lambda: asyncio.run(call())) if entry == "agenerate" else lambda: [*call()]
    with pytest.raises(ConfigurationError, match=f"'{name}' of vLLM.*{words}"):
        run()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        OSError("mine"),
        TimeoutError("mine"),
        RuntimeError("mine"),
        ServerUnavailableError("mine", transient=True),
        RequestRefusedError("mine"),
        GenerationAbortedError("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("return_exceptions", [True, False])
def test_an_error_of_on_tokens_is_no_fault_of_a_server(
    fake_engine, fake, error, return_exceptions
):
    def on_tokens(ids):
        raise error

    request = GenerateRequest(
        input_ids=[5, 6, 7],
        sampling_params={"max_new_tokens": 600, "ignore_eos": True},
        on_tokens=on_tokens,
    )
    with pytest.raises(type(error)) as caught:
        fake_engine.generate_requests(
            [request], timeout=20, return_exceptions=return_exceptions
        )
    assert (type(caught.value), str(caught.value)) == (type(error), "mine")
    assert len(fake.payloads()) == 1
    assert fake_engine.stats().servers[0].state == "serving"
    # The server has nothing more to compute.
    fake.wait_for("/abort_request")


def test_an_address_of_openais_protocol_is_refused_with_the_right_one(fake):
    wrong = f"{fake.url}/v1"
    for arguments in ({"url": wrong}, {"urls": [f"{wrong}/"]}, {"router_url": wrong}):
        with pytest.raises(ServerUnavailableError, match="Leave the /v1 out"):
            AsyncSGLang.connect(**arguments)


def test_versions_and_the_prefix_cache(engine):
    prompt = [7] * 40
    engine.generate(input_ids=prompt, sampling_params=FOUR)
    (answer,) = engine.generate(input_ids=prompt, sampling_params=FOUR)
    assert answer.cached_tokens > 20
    (span,) = answer.versions
    assert (span.version, span.start, span.end) == (engine.weight_version, 0, 4)
    assert engine.flush_cache()
    (answer,) = engine.generate(input_ids=prompt, sampling_params=FOUR)
    assert answer.cached_tokens == 0


# --- many at once


@pytest.mark.slow
def test_order_is_kept_in_a_batch_of_200(engine, score):
    batch = prompts(200)
    params = [{"max_new_tokens": 1 + i % 7, "ignore_eos": True} for i in range(200)]
    answers = generate(engine, batch, params)
    for index, (prompt, answer) in enumerate(zip(batch, answers, strict=True)):
        assert len(answer.token_ids) == 1 + index % 7
        assert_scores(answer, prompt, score, f"item {index}")


def test_many_calls_from_a_foreign_event_loop(engine, score):
    batch = prompts(50)

    async def all_at_once() -> list:
        calls = (
            engine.agenerate(
                input_ids=prompt,
                sampling_params=FOUR,
                return_logprobs=True,
                return_prompt_logprobs=True,
            )
            for prompt in batch
        )
        return await asyncio.gather(*calls)

    answers = asyncio.run(all_at_once())
    for prompt, (answer,) in zip(batch, answers, strict=True):
        assert_scores(answer, prompt, score)


def test_several_threads(engine, score):
    batches = [prompts(count) for count in range(3, 11)]
    with ThreadPoolExecutor(len(batches)) as pool:
        results = list(pool.map(lambda batch: generate(engine, batch), batches))
    for batch, answers in zip(batches, results, strict=True):
        for prompt, answer in zip(batch, answers, strict=True):
            assert_scores(answer, prompt, score)


# --- limits


def test_the_longest_prompt_is_what_the_server_says(engine):
    longest = engine.capabilities.max_prompt
    (answer,) = engine.generate(input_ids=[5] * longest, sampling_params=LONG)
    assert 0 < len(answer.token_ids) <= engine.capabilities.max_context - longest
    with pytest.raises(ConfigurationError, match=f"at most {longest} prompt tokens"):
        engine.generate(input_ids=[5] * (longest + 1), sampling_params=FOUR)
    # Not because we are too strict:
    beyond = with_capabilities(engine, max_prompt=10**6)
    with pytest.raises(RequestRefusedError, match="HTTP 400"):
        beyond.generate(input_ids=[5] * (longest + 1), sampling_params=FOUR)


def test_a_response_without_room_warns_once(fake_engine, log):
    context = fake_engine.capabilities.max_context
    fake_engine.generate(input_ids=[5, 6], max_new_tokens=context - 2)
    assert "does not fit" not in log.text
    for _ in range(2):
        fake_engine.generate(input_ids=[[5, 6], [7]], max_new_tokens=100_000)
    told = "max_new_tokens=100000 does not fit behind a prompt of 2 tokens into the "
    assert f"{told}context of {context} tokens: the response has " in log.text
    assert f"has {context - 2} at most" in log.text
    assert log.text.count("does not fit") == 1


ACCEPTED = [
    *({"temperature": value} for value in (0.0, 1e-5, 5, 1e9)),
    *({"top_p": value} for value in (1e-9, 1)),
    *({"top_k": value} for value in (-1, 1, 10**6, 2**30)),
    *({"min_p": value} for value in (0, 1.0)),
    *({"frequency_penalty": value} for value in (-2, 2)),
    *({"presence_penalty": value} for value in (-2, 2)),
    *({"repetition_penalty": value} for value in (1e-3, 2)),
    # A server without deterministic inference takes one where nothing is drawn.
    *({"sampling_seed": value, "temperature": 0.0} for value in (-(2**63), 2**63 - 1)),
    *({"min_new_tokens": value} for value in (0, 4)),
    {"max_new_tokens": 0},
    {"max_new_tokens": 2**70, "stop_token_ids": list(range(90)), "ignore_eos": False},
    {"logit_bias": {"5": 1, 6: -1e9, 7: 3e38}},
    {"stop": ["a", "b"]},
    {"stop_regex": "a|b"},
    {"skip_special_tokens": False},
    {"spaces_between_special_tokens": False},
    {"no_stop_trim": True},
    {"ignore_eos": True},
]
REFUSED = [
    *({"temperature": value} for value in (-0.1,)),
    *({"top_p": value} for value in (0, -0.1, 1.1)),
    *({"top_k": value} for value in (0, -2)),
    *({"min_p": value} for value in (-0.1, 1.1)),
    *({"frequency_penalty": value} for value in (-2.1, 2.1)),
    *({"presence_penalty": value} for value in (-2.1, 2.1)),
    *({"repetition_penalty": value} for value in (0, 2.1)),
    {"sampling_seed": 2**63},
    {"min_new_tokens": 5},
    {"logit_bias": {"100000": 1.0}},
    {"stop": [1]},
    {"stop": 1},
    {"ignore_eos": 1},
    {"regex": "a"},
    {"wibble": 1},
]


@pytest.mark.slow
def test_accepted_parameters_are_accepted_by_the_server(engine):
    params = [{**FOUR, **own} for own in ACCEPTED]
    engine.generate(input_ids=[[5, 6]] * len(params), sampling_params=params)
    grammars = {"regex", "json_schema", "ebnf", "structural_tag"}
    tried = {name for own in params for name in own} | grammars
    assert tried == set(SAMPLING_PARAMETERS)


@pytest.mark.parametrize("params", REFUSED, ids=repr)
def test_refused_parameters_are_refused_by_the_server(engine, params):
    with pytest.raises((ConfigurationError, UnsupportedByServerError)):
        engine.generate(input_ids=[5], sampling_params={**FOUR, **params})
    payload = {"input_ids": [5], "sampling_params": {**FOUR, **params}}
    answer = requests.post(f"{engine.server_url}/generate", json=payload, timeout=30)
    assert answer.status_code == 400


# --- bad input


BAD_INPUT = {
    "unknown parameter": (
        {"input_ids": [5], "sampling_params": {"temprature": 1}},
        ["'temprature'", "'temperature'"],
    ),
    "bad value": (
        {"input_ids": [5], "sampling_params": {"temperature": -1}},
        ["temperature=-1", "[0, inf)"],
    ),
    "outside the vocabulary": (
        {"input_ids": [[5], [6, 10**6]]},
        ["Prompt 1", "1000000", "tokenizer"],
    ),
    "negative": ({"input_ids": [[5], [-1]]}, ["Prompt 1", "-1"]),
    "kills the server": (
        {"input_ids": [5], "sampling_params": {"top_k": 2**40}},
        [f"top_k={2**40}"],
    ),
    "stop outside": (
        {"input_ids": [5], "sampling_params": {"stop_token_ids": [10**6]}},
        ["stop_token_ids", "1000000"],
    ),
    "empty prompt": ({"input_ids": [[5], []]}, ["Prompt 1", "empty", "bos"]),
    "empty text": ({"prompts": ["a", ""]}, ["Prompt 1", "empty"]),
    "no room": ({"input_ids": [5] * 2042}, ["2042 tokens", "2041", "context_length"]),
    "both": (
        {"prompts": "a", "input_ids": [5]},
        ["Cannot provide both prompts and input_ids"],
    ),
    "neither": ({}, ["Must provide either prompts or input_ids"]),
    "no text": ({"prompts": [[5]]}, ["Prompt 0", "list", "input_ids"]),
    "no list": ({"input_ids": 5}, ["input_ids is a int", "list of integers"]),
    "mixed": ({"input_ids": [[5], 6]}, ["Prompt 1", "a int"]),
    "floats": ({"input_ids": torch.tensor([5.0, 6.0])}, ["a float", "token ids"]),
    "too few parameters": (
        {"input_ids": [[5], [6]], "sampling_params": [{}]},
        ["1 sampling_params", "2 prompts"],
    ),
    "no parameters": ({"input_ids": [5], "sampling_params": 5}, ["5", "mapping"]),
    "no budget": ({"input_ids": [5], "timeout": 0}, ["timeout", "positive", "got 0"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_never_sent(fake, fake_engine, case):
    arguments, words = BAD_INPUT[case]
    with pytest.raises(ConfigurationError) as caught:
        fake_engine.generate(**arguments)
    assert all(word in str(caught.value) for word in words)
    assert isinstance(caught.value, ValueError)
    assert fake.payloads() == []


def test_bad_input_harms_nothing_else_in_flight(engine, score):
    batch = prompts(20)
    params = {"max_new_tokens": 100, "ignore_eos": True}
    engine.get_tokenizer()
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(generate, engine, batch, params)
        while not run_sync(engine.control.running_requests()):
            assert not good.done()
        for arguments, _ in BAD_INPUT.values():
            with pytest.raises(ConfigurationError):
                engine.generate(**arguments)
        assert not good.done()
        answers = good.result(60)
    for prompt, answer in zip(batch, answers, strict=True):
        assert len(answer.token_ids) == 100
        assert_scores(answer, prompt, score)
    assert engine.health()


def test_an_item_that_only_the_server_refuses(engine, score):
    """Our checks let it through, and SGLang takes at most 32 stop texts."""
    batch = prompts(3)
    params = [FOUR, {**FOUR, "stop": [f"<stop {i}>" for i in range(33)]}, FOUR]
    with pytest.raises(RequestRefusedError, match="at most 32 stop") as caught:
        generate(engine, batch, params)
    assert (caught.value.index, caught.value.status) == (1, 400)
    assert caught.value.__notes__ == ["It is item 1 of 3."]
    first, bad, last = generate(engine, batch, params, return_exceptions=True)
    assert isinstance(bad, RequestRefusedError)
    assert bad.index == 1
    assert_scores(first, batch[0], score)
    assert_scores(last, batch[2], score)


def test_a_text_that_was_cut_within_a_character(fake_engine):
    batch = ["fine", "cut \ud83d", "well"]
    words = "has half of a character in 'cut"
    with pytest.raises(ConfigurationError, match=f"Prompt 1 of the batch {words}"):
        fake_engine.generate(batch, FOUR)
    good, bad, last = fake_engine.generate(batch, FOUR, return_exceptions=True)
    assert good.token_ids
    assert last.token_ids
    assert isinstance(bad, ConfigurationError)
    assert words in str(bad)
    chat = {"messages": [{"role": "user", "content": batch[1]}]}
    for send in (
        lambda: fake_engine.chat_completion(chat),
        lambda: fake_engine.completion({"prompt": batch[1]}),
        lambda: fake_engine.generate("fine", {**FOUR, "stop": [batch[1]]}),
    ):
        with pytest.raises(ConfigurationError, match="half of a character in 'cut"):
            send()


# --- giving up


def test_a_budget_that_is_used_up_leaves_the_engine_well(engine):
    start = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"0\.\d s"):
        engine.generate(input_ids=[[5]] * 4, sampling_params=LONG, timeout=0.5)
    assert time.monotonic() - start < 60
    wait_until_idle(engine)
    assert engine.generate(input_ids=[5], sampling_params=FOUR)


def test_cancelling_a_call_ends_it_on_the_server(engine):
    async def give_up() -> None:
        call = asyncio.ensure_future(
            engine.agenerate(input_ids=[[5], [6]], sampling_params=LONG)
        )
        while not await asyncio.wrap_future(submit(engine.control.running_requests())):
            assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(give_up())
    wait_until_idle(engine)


# --- what it says about the model


def safetensors_header(folder: str) -> dict[str, tuple[str, list[int]]]:
    """Name -> (type, shape) as the checkpoint's own header has them."""
    with open(Path(folder) / "model.safetensors", "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}


def test_model_metadata_equals_the_checkpoint(engine, tiny_model_path):
    header = safetensors_header(tiny_model_path)
    assert len(header) > 20
    names = {torch.float32: "F32"}
    found = {
        name: (names[dtype], list(shape))
        for name, (dtype, shape) in engine.get_model_metadata().items()
    }
    assert found == header


def test_sizes(engine):
    assert engine.get_tp_size() == engine.get_dp_size() == engine.get_world_size() == 1
    assert engine.num_replicas == 1


def test_tokenizer(engine, tokenizer):
    found = engine.get_tokenizer()
    assert found.get_vocab() == tokenizer.get_vocab()
    assert engine.get_tokenizer() is found


def test_master_address_and_ports(engine):
    ports = {engine.get_master_port() for _ in range(5)}
    assert len(ports) > 1
    assert engine.get_master_address() == "127.0.0.1"


# --- its life


def test_repr(engine, fake_engine, fake, tiny_model_path):
    text = repr(engine)
    for part in (engine.server_url, tiny_model_path, "owned=True", "status='serving'"):
        assert part in text
    assert f"weight_version={engine.weight_version!r}" in text
    assert "owned=False, status='serving'" in repr(fake_engine)
    with fake_engine.weight_update() as update:
        update.mark_inconsistent("half of them came.")
    assert "status='weights inconsistent'" in repr(fake_engine)
    fake_engine.shutdown()
    assert "status='closed'" in repr(fake_engine)


def test_health(engine, fake, fake_engine):
    assert engine.health()
    assert fake_engine.health()
    for fault in ("error_500", "hang_up"):
        with fake.misbehaving(fault, "/health"):
            assert not fake_engine.health()
    fake_engine.shutdown()
    assert not fake_engine.health()


def test_shutting_down_twice_and_using_it_afterwards(fake):
    with AsyncSGLang.connect(fake.url) as engine:
        engine.shutdown()
        engine.shutdown()
        sent = len(fake.requests)
        for call in (lambda: engine.generate(input_ids=[5]), engine.flush_cache):
            with pytest.raises(ServerUnavailableError, match="was shut down"):
                call()
    assert len(fake.requests) == sent


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "127.0.0.1:2"]
)
def test_a_dead_url(url):
    start = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="Check that the server") as caught:
        AsyncSGLang.connect(url)
    assert url in str(caught.value)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_copies_need_no_network(tiny_model_path, clone):
    with FakeServer(tiny_model_path) as fake:
        engine = AsyncSGLang.connect(fake.url)
        engine.generate(input_ids=[5], sampling_params=FOUR)
        tokenizer = engine.get_tokenizer()
        assert engine.get_tokenizer() is tokenizer
    # Nobody is there any more.
    other = clone(engine)
    assert other._served_model._tokenizer is None, "It is large, and read again."
    assert other.server_url == engine.server_url
    assert other.capabilities == engine.capabilities
    assert "owned=False" in repr(other)
    with pytest.raises(ServerUnavailableError, match="Check that the server"):
        other.generate(input_ids=[5])
    other.shutdown()
    engine.shutdown()


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_copies_do_not_own_the_server(engine, score, clone):
    with clone(engine) as other:
        (answer,) = generate(other, [[5, 6]])
        assert_scores(answer, [5, 6], score)
        assert "owned=True" in repr(engine)
        assert "owned=False" in repr(other)
    assert engine.health()
    assert generate(engine, [[5]])


def test_one_weight_update_at_a_time(fake_engine):
    with (
        fake_engine.weight_update(),
        pytest.raises(WeightSyncStateError, match="in progress"),
        fake_engine.weight_update(),
    ):
        pass
    with fake_engine.weight_update() as update:
        update.commit("7")
    assert fake_engine.weight_version == "7"


def test_inconsistent_weights_are_not_used(fake, fake_engine):
    with fake_engine.weight_update() as update:
        update.mark_inconsistent("Half of them came.")
    with pytest.raises(
        WeightSyncStateError, match="Half of them came.*send the weights"
    ):
        fake_engine.generate(input_ids=[5])
    with pytest.raises(WeightSyncStateError, match="Half of them came"):
        copy.deepcopy(fake_engine).generate(input_ids=[5])
    assert fake.payloads() == []
    with fake_engine.weight_update() as update:
        update.commit("8")
    fake.weight_version = "8"
    fake_engine.generate(input_ids=[5])
    assert fake.payloads()[-1]["extra_key"] == ["8"]


def test_one_engine_for_every_thread_of_its_life(fake, fake_engine):
    """Calls, copies and a shutdown at the same time end in answers or typed errors."""
    errors = []

    def use() -> None:
        try:
            for _ in range(20):
                copy.deepcopy(fake_engine)
                fake_engine.generate(input_ids=[5], sampling_params=FOUR)
        except ServerUnavailableError:
            pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    fake.wait_for("/generate", 30)
    fake_engine.shutdown()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_profile(engine, tmp_path):
    """The server writes a trace of what it did meanwhile, and goes on."""
    engine.start_profile(str(tmp_path), activities=["CPU"])
    engine.generate(input_ids=[5], sampling_params=FOUR)
    engine.stop_profile()
    wait_until(lambda: list(tmp_path.rglob("*.trace.json.gz")))
    assert engine.generate(input_ids=[5], sampling_params=FOUR)


def test_a_process_forked_in_a_weight_update_may_update(fake_engine):
    """The update is the parent's; nobody would end it in the child."""

    def use():
        with fake_engine.weight_update():
            pass

    with fake_engine.weight_update():
        child = get_context("fork").Process(target=use)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        with pytest.raises(WeightSyncStateError, match="in progress"):
            use()

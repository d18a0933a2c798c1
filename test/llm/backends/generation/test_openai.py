"""Answers of OpenAI's protocol: whole ones, and those that something cut off."""

from __future__ import annotations

import pytest
from aiohttp import web
from helpers.engines import fleet_of

from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.errors import (
    GenerationAbortedError,
    NotFiniteError,
    ServerUnavailableError,
)

ROUTES = {"/v1/chat/completions": "chat_completion", "/v1/completions": "completion"}
EVERY_ROUTE = pytest.mark.parametrize("path", ROUTES)


def answer(*reasons, **fields):
    choices = [{"finish_reason": reason, **fields} for reason in reasons]
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return web.json_response({"choices": choices, "usage": usage})


def ask(engine, path):
    return getattr(engine, ROUTES[path])({"messages": [], "n": 2})


@EVERY_ROUTE
@pytest.mark.parametrize("reasons", [["abort"], ["stop", "abort"]])
def test_an_answer_that_an_update_cut_off_is_sent_again(
    fake, fake_engine, path, reasons
):
    """As a weight update does on a server without update sessions."""

    def reply(content):
        if len(fake.payloads(path)) > 1:
            return answer("stop", "tool_calls")
        fleet_of(fake_engine).change_weights(ServedWeights.abort_requests)
        return answer(*reasons)

    fake.routes[path] = reply
    found = ask(fake_engine, path)
    assert [each["finish_reason"] for each in found["choices"]] == [
        "stop",
        "tool_calls",
    ]
    first, second = fake.payloads(path)
    assert first.pop("rid") != second.pop("rid")
    assert first == second
    assert fake_engine.stats().completed == 1


def refuse_early(content):
    error = {"message": "Aborted by AbortReq.", "code": 400}
    return web.json_response({"error": error}, status=400)


@EVERY_ROUTE
@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (lambda content: answer("abort"), GenerationAbortedError, "after 3 tokens"),
        (lambda content: answer("stop", "abort"), GenerationAbortedError, "aborted"),
        (refuse_early, GenerationAbortedError, "after 0 tokens"),
        (
            lambda content: answer("stop", matched_stop="NaN happened"),
            NotFiniteError,
            "NaN",
        ),
        (lambda content: answer(None), ServerUnavailableError, "unknown reason"),
        (lambda content: answer("error"), ServerUnavailableError, "unknown reason"),
        (lambda content: answer(), ServerUnavailableError, "without choices"),
        (lambda content: web.json_response([]), ServerUnavailableError, "without"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(
    fake, fake_engine, path, reply, error, words
):
    fake.routes[path] = reply
    with pytest.raises(error, match=words) as caught:
        ask(fake_engine, path)
    assert type(caught.value) is error
    assert fake.url in str(caught.value)
    assert len(fake.payloads(path)) == 1
    assert fake_engine.stats().completed == 0


@EVERY_ROUTE
def test_an_abort_of_the_caller_is_never_sent_again(fake, fake_engine, path):
    def reply(content):
        fleet_of(fake_engine).change_weights(ServedWeights.abort_requests)
        (request,) = fake_engine._dispatcher.in_flight._running
        request.aborted = True
        return answer("abort")

    fake.routes[path] = reply
    with pytest.raises(GenerationAbortedError) as caught:
        ask(fake_engine, path)
    assert caught.value.requested
    assert len(fake.payloads(path)) == 1

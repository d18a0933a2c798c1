"""Responses that go on through weight updates, aborts and servers that end."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import GenerationAbortedError, ServerUnavailableError
from torchrl_sglang.support.event_loop import run_sync

KEPT = 3
"""Tokens of a response when it is aborted."""


@pytest.fixture
def older(tiny_model_path):
    """A server that cannot keep requests in a weight update."""
    with FakeServer(tiny_model_path) as fake:
        del fake.routes["/begin_weight_update"]
        fake.tokens_until_abort = KEPT
        yield fake


@pytest.fixture
def engine(older):
    with AsyncSGLang.connect(older.url) as engine:
        assert not engine.capabilities.keeps_requests
        yield engine


class Running:
    """A call in a thread, whose requests wait on a server."""

    def __init__(self, fake, call, requests=1, fault="hang"):
        self._result = self._error = None
        count = len(fake.payloads())
        self._thread = threading.Thread(target=self._run, args=(call,))
        with fake.misbehaving(fault):
            self._thread.start()
            fake.wait_for("/generate", count + requests)

    def _run(self, call):
        try:
            self._result = call()
        except Exception as error:
            self._error = error

    def wait(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


@contextmanager
def update(engine, fake, version):
    """A weight update; requests run again behind it."""
    with engine.weight_update() as update:
        update.holds_requests()
        update.aborts_requests()
        engine.interrupt_requests(timeout=10)
        yield
        fake.weight_version = version
        update.commit(version)


def generate(engine, fake, prompts, params, fault="hang", **options):
    """Returns the responses of a call with a weight update in its middle."""
    running = Running(
        fake,
        lambda: engine.generate(input_ids=prompts, sampling_params=params, **options),
        requests=len(prompts),
        fault=fault,
    )
    with update(engine, fake, "1"):
        # Nothing is sent meanwhile.
        assert len(fake.payloads()) == len(prompts)
    return running.wait()


def sent(fake, *names):
    found = [{**p, **p["sampling_params"][0]} for p in fake.payloads()]
    return [
        tuple(p[n][0] if isinstance(p.get(n), list) else p.get(n) for n in names)
        for p in found
    ]


def spans(answer):
    return [(span.version, span.start, span.end) for span in answer.versions]


@pytest.mark.parametrize(
    "options", [{}, {"return_logprobs": True}, {"top_logprobs": 2}]
)
def test_the_rest_is_sent_after_the_update(older, engine, options):
    (answer,) = generate(engine, older, [[5, 6]], {"max_new_tokens": 8}, **options)
    assert sent(older, "input_ids", "max_new_tokens", "extra_key") == [
        ([5, 6], 8, "default"),
        ([5, 6, 5, 6, 5], 8 - KEPT, "1"),
    ]
    assert len(answer.token_ids) == 8
    assert spans(answer) == [("default", 0, KEPT), ("1", KEPT, 8)]
    assert answer.finish_reason == "length"
    assert not answer.mixed_state
    wanted = {"log_probs": "return_logprobs", "top_log_probs": "top_logprobs"}
    for field, option in wanted.items():
        values = getattr(answer, field)
        assert values is None if option not in options else len(values) == 8


def test_a_server_resumes_before_it_gets_requests(older, engine, hf_model):
    """A server that takes requests in meanwhile resumes only when it has them all."""
    sender = SGLangWeightSyncScheme(engine, transport="cuda_ipc").create_sender()
    sender.register_model(hf_model)
    running = Running(
        older,
        lambda: engine.generate(
            input_ids=[[5]] * 32, sampling_params={"max_new_tokens": 8}
        ),
        requests=32,
    )
    sender.update_weights()
    assert len(running.wait()) == 32
    paths = [path for _, path, _ in older.requests]
    resumed = paths.index("/continue_generation")
    assert paths[:resumed].count("/generate") == 32
    assert paths[resumed:].count("/generate") == 32


def test_many_updates(older, engine):
    """Each costs a prefill, and no token is computed twice."""
    running = Running(
        older,
        lambda: engine.generate(
            input_ids=[5], sampling_params={"max_new_tokens": 3 * KEPT + 1}
        ),
    )
    for version in ("1", "2", "3"):
        with older.misbehaving("hang"):
            with update(engine, older, version):
                pass
            older.wait_for("/generate", int(version) + 1)
    older.recover()
    # The last one was aborted, too, and by nobody of this engine.
    with pytest.raises(GenerationAbortedError) as caught:
        running.wait()
    assert sent(older, "max_new_tokens", "extra_key") == [
        (10, "default"),
        (7, "1"),
        (4, "2"),
        (1, "3"),
    ]
    partial = caught.value.partial
    assert len(partial.token_ids) == 10
    assert spans(partial) == [("default", 0, 3), ("1", 3, 6), ("2", 6, 9), ("3", 9, 10)]


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        ({"min_new_tokens": 5}, {"min_new_tokens": 2}),
        ({"min_new_tokens": 2}, {"min_new_tokens": 0}),
        ({"stop": "xyz"}, {"stop": "xyz"}),
        ({"sampling_seed": 7, "temperature": 0.0}, {"sampling_seed": 7}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [50]}, {"stop_token_ids": 50}),
    ],
)
def test_what_remains_of_sampling_parameters(older, engine, given, rest):
    generate(engine, older, [[5]], {"max_new_tokens": 8, **given})
    names = ["max_new_tokens", *rest]
    assert sent(older, *names)[1] == (5, *rest.values())


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_a_response_that_cannot_go_on_begins_anew(older, engine, params):
    """An update waits for it, when it has done so once."""
    (answer,) = generate(engine, older, [[5]], {"max_new_tokens": 8, **params})
    assert sent(older, "input_ids", "max_new_tokens", "extra_key") == [
        ([5], 8, "default"),
        ([5], 8, "1"),
    ]
    assert spans(answer) == [("1", 0, 8)]


def test_an_update_waits_for_a_response_that_has_begun_anew_before(older, engine):
    params = {"max_new_tokens": 8, "frequency_penalty": 0.5}
    running = Running(
        older, lambda: engine.generate(input_ids=[5], sampling_params=params)
    )
    # It computes nothing, and ends what it has when it goes on.
    older.silent_while_paused = True
    run_sync(engine.control.pause("retract"))
    with update(engine, older, "1"):
        pass
    older.wait_for("/generate", 2)
    updated = threading.Event()

    def update_again():
        with update(engine, older, "2"):
            updated.set()

    thread = threading.Thread(target=update_again)
    thread.start()
    assert not updated.wait(0.3)
    run_sync(engine.control.resume())
    (answer,) = running.wait()
    thread.join(30)
    assert updated.is_set()
    assert spans(answer) == [("1", 0, 8)]
    assert len(older.payloads()) == 2


def test_samples_go_on_one_by_one(older, engine):
    answers = generate(engine, older, [[5]] * 4, {"max_new_tokens": 8})
    assert [len(answer.token_ids) for answer in answers] == [8] * 4
    assert sent(older, "max_new_tokens") == [(8,)] * 4 + [(8 - KEPT,)] * 4


def test_a_response_that_had_ended_is_not_sent_again(older, engine):
    """Servers do not look for an end in the step of an abort."""
    (answer,) = generate(engine, older, [[5]], {"max_new_tokens": KEPT})
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", KEPT)
    assert len(older.payloads()) == 1


def test_a_stop_token_of_the_last_step_ends_a_response(older, engine):
    params = {"max_new_tokens": 8, "stop_token_ids": [5]}
    (answer,) = generate(engine, older, [[5]], params)
    assert (answer.finish_reason, answer.matched_stop) == ("stop", 5)
    assert len(older.payloads()) == 1


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
def test_a_stop_string_over_a_boundary(older, engine, name):
    tokenizer = engine.get_tokenizer()
    prompt = [20, 21, 22]
    # The fake repeats what it is sent: 20 21 22 | 20 21 22 20 21 ...
    stop = tokenizer.decode([22, 20])
    if name == "stop_regex":
        stop = re.escape(stop)
    (answer,) = generate(engine, older, [prompt], {"max_new_tokens": 8, name: stop})
    assert answer.token_ids == [20, 21, 22, 20]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    assert spans(answer) == [("default", 0, KEPT), ("1", KEPT, KEPT + 1)]


def test_a_request_whose_grammar_is_compiled_begins_anew(older, engine):
    """The server calls it a refusal; what it has generated follows another prompt."""
    params = {"max_new_tokens": 4}
    (answer,) = generate(engine, older, [[5, 6]], params, fault="hang_compiling")
    assert answer.token_ids == [5, 6, 5, 6]
    assert sent(older, "input_ids", "max_new_tokens") == [([5, 6], 4)] * 2


def test_an_abort_while_a_grammar_is_compiled(older, engine):
    def call():
        return engine.generate(input_ids=[5], request_ids=["a"])

    running = Running(older, call, fault="hang_compiling")
    assert engine.abort(["a"]) == 1
    with pytest.raises(GenerationAbortedError) as caught:
        running.wait()
    assert caught.value.requested
    assert caught.value.partial.token_ids == []


@pytest.mark.parametrize("return_partial", [True, False])
def test_an_abort_gives_the_tokens_so_far(older, engine, return_partial):
    def call():
        return engine.generate(
            input_ids=[5],
            sampling_params={"max_new_tokens": 9},
            request_ids=["a"],
            return_logprobs=True,
            return_partial=return_partial,
        )

    running = Running(older, call)
    with older.misbehaving("hang"):
        with update(engine, older, "1"):
            pass
        older.wait_for("/generate", 2)
    assert engine.abort(["a"]) == 1
    if return_partial:
        (answer,) = running.wait()
    else:
        with pytest.raises(GenerationAbortedError) as caught:
            running.wait()
        assert caught.value.requested
        answer = caught.value.partial
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) == len(answer.log_probs) == 2 * KEPT
    assert spans(answer) == [("default", 0, KEPT), ("1", KEPT, 2 * KEPT)]


def test_a_request_that_was_never_sent_returns_no_tokens(older, tiny_model_path):
    with AsyncSGLang.connect(older.url, max_in_flight=1) as engine:
        running = Running(
            older,
            lambda: engine.generate(
                input_ids=[[5], [6]],
                sampling_params={"max_new_tokens": 9},
                return_logprobs=True,
                return_partial=True,
            ),
        )
        engine.abort()
        first, second = running.wait()
    assert (len(first.token_ids), first.finish_reason) == (KEPT, "abort")
    assert (second.token_ids, second.log_probs) == ([], [])
    assert (second.finish_reason, second.versions) == ("abort", ())


def test_a_stream_goes_on(older, engine):
    running = Running(
        older,
        lambda: dict(
            engine.generate_iter(
                input_ids=[[5], [6]], sampling_params={"max_new_tokens": 8}
            )
        ),
        requests=2,
    )
    with update(engine, older, "1"):
        pass
    answers = running.wait()
    assert [len(answers[index].token_ids) for index in range(2)] == [8, 8]


def test_servers_that_keep_requests_are_not_asked_to_abort_them(fake, fake_engine):
    """Except for those whose tokens they would count anew."""
    fake.tokens_until_abort = KEPT
    running = Running(
        fake,
        lambda: fake_engine.generate(
            input_ids=[[5], [6]],
            sampling_params=[
                {"max_new_tokens": 8},
                {"max_new_tokens": 8, "min_new_tokens": 5},
            ],
        ),
        requests=2,
    )
    with update(fake_engine, fake, "1"):
        aborted = [content for _, path, content in fake.requests if "abort" in path]
        assert [set(content) for content in aborted] == [{"rid"}]
    fake.recover()
    running.wait()
    assert ([6] * 4, 5, 2) in sent(
        fake, "input_ids", "max_new_tokens", "min_new_tokens"
    )


def test_a_failed_update_lets_responses_go_on(older, engine):
    running = Running(
        older,
        lambda: engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 8}),
    )
    with engine.weight_update() as update:
        update.holds_requests()
        update.aborts_requests()
        engine.interrupt_requests(timeout=10)
        update.abort()
    (answer,) = running.wait()
    assert spans(answer) == [("default", 0, 8)]


LONG = {"max_new_tokens": 300}
"""A response that is streamed."""


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"return_logprobs": True}, {"top_logprobs": 2}]
)
def test_tokens_outlive_their_server(older, tiny_model_path, servers, options):
    """A server hangs up in the middle of a long response."""

    def whole_request(content):
        return content["sampling_params"]["max_new_tokens"] == 300

    with FakeServer(tiny_model_path) as other:
        del other.routes["/begin_weight_update"]
        urls = [older.url, other.url][:servers]
        other.tokens_until_abort = KEPT
        with (
            AsyncSGLang.connect(urls=urls) as engine,
            older.misbehaving("hang_up_mid_stream", when=whole_request),
            other.misbehaving("hang_up_mid_stream", when=whole_request),
        ):
            (answer,) = engine.generate(input_ids=[5], sampling_params=LONG, **options)
        found = sent(older, "input_ids", "max_new_tokens") + sent(
            other, "input_ids", "max_new_tokens"
        )
    assert sorted(found) == [([5], 300), ([5] * 4, 300 - KEPT)]
    assert len(answer.token_ids) == 300
    assert spans(answer) == [("default", 0, 300)]
    for field in ("log_probs", "top_log_probs"):
        values = getattr(answer, field)
        assert values is None or len(values) == 300


def test_a_request_that_ends_every_server_is_not_sent_for_ever(older):
    with (
        AsyncSGLang.connect(older.url, max_attempts=3) as engine,
        older.misbehaving("hang_up_mid_stream"),
        pytest.raises(ServerUnavailableError, match="Payload"),
    ):
        engine.generate(input_ids=[5], sampling_params=LONG)
    assert sent(older, "max_new_tokens") == [(300,), (297,), (294,)]


def test_a_response_that_has_ended_needs_its_server_no_more(older, engine):
    """A server hangs up between the end of a response and that of its stream."""
    with older.misbehaving("hang_up_at_end"):
        (answer,) = engine.generate(input_ids=[5], sampling_params=LONG)
    assert len(older.payloads()) == 1
    assert (answer.finish_reason, answer.matched_stop) == ("stop", "the end")
    assert len(answer.token_ids) == KEPT


@pytest.mark.parametrize("length", [128, 129])
def test_a_full_server_is_asked_again(older, engine, length):
    params = {"max_new_tokens": length}
    with older.misbehaving("abort_503", when=lambda _: len(older.payloads()) == 1):
        (answer,) = engine.generate(input_ids=[5], sampling_params=params)
    assert len(answer.token_ids) == length
    assert len(older.payloads()) == 2


def test_short_responses_are_not_streamed(older, engine):
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 128})
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 129})
    assert [payload.get("stream") for payload in older.payloads()] == [None, True]

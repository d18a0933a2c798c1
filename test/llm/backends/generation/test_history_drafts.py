"""Drafts from earlier responses: what is remembered, sent, and when it ends.

The server is a fake: those on CPUs verify no drafts. ``test_history_drafts_gpu``
has real ones.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aiohttp import web
from helpers.collecting import wait_until
from helpers.fake_server import FakeServer
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang import AsyncSGLang, HistoryDrafts
from torchrl_sglang.backends.generation.draft_history import DraftHistory
from torchrl_sglang.backends.launch.history_drafts import (
    history_arguments,
    to_history_drafts,
)
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.types import NGRAM_PLUGIN

NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_external_sam_budget": 7,
    "internal_states": [{NGRAM_PLUGIN: True}],
}
PROMPTS = [[5, 6, 7, first] for first in range(20, 24)]


class Corpora:
    """The routes of a server for texts, and how many passes it says it made."""

    def __init__(self, server: FakeServer) -> None:
        self.held: dict[str, list[str]] = {"torchrl_sglang-old": ["x"], "mine": ["y"]}
        self.refuses = False
        self.passes = 2
        self.misread = 0
        self.added = 0
        generate = server.routes["/generate"]

        def counted(content: dict[str, Any]) -> Any:
            answer = json.loads(generate(content).body)
            answer["meta_info"]["spec_verify_ct"] = self.passes
            return web.json_response(answer)

        server.routes |= {
            "/generate": counted,
            "/list_external_corpora": self._list,
            "/add_external_corpus": self._add,
            "/remove_external_corpus": self._remove,
        }

    def _list(self, _: Any) -> web.Response:
        counts = {name: len(texts) for name, texts in self.held.items()}
        return web.json_response({"success": True, "corpus_token_counts": counts})

    def _add(self, content: dict[str, Any]) -> web.Response:
        self.added += 1
        if self.refuses:
            answer = {"success": False, "message": "no room"}
            return web.json_response(answer, status=400)
        name, texts = content["corpus_id"], content["documents"]
        assert name not in self.held
        self.held[name] = texts
        tokens = sum(map(len, texts)) + len(texts) - 1 + self.misread
        return web.json_response({"success": True, "loaded_token_count": tokens})

    def _remove(self, content: dict[str, Any]) -> web.Response:
        del self.held[content["corpus_id"]]
        return web.json_response({"success": True, "message": ""})


@pytest.fixture
def corpora(tiny_model_path) -> Iterator[tuple[AsyncSGLang, Corpora]]:
    with FakeServer(tiny_model_path, server_args=NGRAM) as server:
        held = Corpora(server)
        with AsyncSGLang.connect(
            server.url, model=tiny_model_path, drafts="history"
        ) as engine:
            yield engine, held


@pytest.fixture
def told(caplog) -> Iterator[Any]:
    torchrl_logger.addHandler(caplog.handler)
    yield caplog
    torchrl_logger.removeHandler(caplog.handler)


def ask(engine: AsyncSGLang, length: int = 8, prompts: Any = PROMPTS) -> Any:
    return engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": length, "ignore_eos": True},
    )


def test_an_epoch_is_sent_when_its_prompts_come_again(corpora, tokenizer):
    engine, held = corpora
    ask(engine)
    stats = engine.stats().drafts
    assert (stats.prompts, stats.tokens, stats.sent_tokens) == (4, 4 * 12, 0)
    assert held.added == 0
    responses = ask(engine)
    wait_until(lambda: engine.stats().drafts.sent_tokens == 4 * 12 + 3)
    # Of this package there is one name; the other texts are somebody else's.
    (name,) = held.held.keys() - {"mine"}
    assert held.held[name] == [
        tokenizer.decode([*prompt, *response.token_ids])
        for prompt, response in zip(PROMPTS, responses, strict=True)
    ]
    assert responses[0].verify_passes == 2
    # What was sent is not sent again; the next epoch sends what this one answered.
    added = held.added
    ask(engine, prompts=[[9, 9, 9]])
    assert held.added == added
    ask(engine)
    wait_until(lambda: held.added == added + 1)


def test_a_server_that_takes_nothing_costs_a_warning(corpora, told):
    engine, held = corpora
    held.refuses = True
    for _ in range(3):
        assert len(ask(engine)) == 4
    wait_until(lambda: "no room" in told.text)
    assert told.text.count("costs speed and nothing else") == 1
    assert engine.stats().drafts.sent_tokens == 0


def test_one_server_that_takes_nothing_keeps_no_other_from_it(tiny_model_path, told):
    with (
        FakeServer(tiny_model_path, server_args=NGRAM) as one,
        FakeServer(tiny_model_path, server_args=NGRAM) as other,
    ):
        first, second = Corpora(one), Corpora(other)
        first.refuses = True
        with AsyncSGLang.connect(
            urls=[one.url, other.url], model=tiny_model_path, drafts="history"
        ) as engine:
            ask(engine)
            ask(engine)
            wait_until(lambda: engine.stats().drafts.sent_tokens == 4 * 12 + 3)
    assert "no room" in told.text
    assert first.held.keys() == {"torchrl_sglang-old", "mine"}
    assert len(second.held) == 2
    assert "torchrl_sglang-old" not in second.held


def test_a_tokenizer_that_reads_something_else_is_told(corpora, told):
    engine, held = corpora
    held.misread = 20
    ask(engine)
    ask(engine)
    wait_until(lambda: "reads 71 tokens in texts of 51" in told.text)


def test_drafts_that_do_not_pay_are_switched_off(corpora, told):
    engine, held = corpora
    ask(engine)
    ask(engine)
    wait_until(lambda: engine.stats().drafts.sent_tokens > 0)
    held.passes = 2600
    ask(engine, length=52)
    stats = engine.stats().drafts
    assert not stats.on
    assert stats.accepted_length == 52 / 2600
    assert "gives 0.02 tokens, and from 3.0 on they pay" in told.text
    wait_until(lambda: held.held.keys() == {"mine"})
    added = held.added
    ask(engine)
    ask(engine)
    assert held.added == added
    assert engine.stats().drafts.prompts == 0


def test_copies_of_an_engine_remember_too(corpora):
    engine, _ = corpora
    with pickle.loads(pickle.dumps(engine)) as copy:
        ask(copy)
        assert copy.stats().drafts.prompts == 4
        assert engine.stats().drafts.prompts == 0


def test_servers_that_take_no_texts_are_refused(tiny_model_path):
    others = ({}, NGRAM, {**NGRAM, "speculative_ngram_external_sam_budget": 0})
    for server_args in others:
        with (
            FakeServer(tiny_model_path, server_args=server_args) as server,
            pytest.raises(UnsupportedByServerError, match="--speculative-algorithm"),
        ):
            AsyncSGLang.connect(server.url, drafts="history")


def test_the_least_answered_prompts_are_forgotten():
    history = DraftHistory(most_tokens=30)
    for key in (b"a", b"b", b"a", b"c"):
        history.end(key, [1, 2], [3] * 8)
    # "b" was answered longest ago.
    assert (len(history), history.tokens) == (2, 30)
    history.begin(b"b")
    assert not history.is_due
    history.begin(b"a")
    assert history.is_due
    assert len(history.take()) == 3


def test_each_prompt_has_its_latest_responses():
    history = DraftHistory(most_tokens=10_000)
    for number in range(10):
        history.end(b"a", list(range(40)), [100 + number])
    history.begin(b"a")
    texts = history.take()
    assert [text[-1] for text in texts] == list(range(102, 110))
    assert {tuple(text[:-1]) for text in texts} == {tuple(range(23, 40))}
    # Less than half of it is new.
    history.end(b"a", list(range(40)), [110])
    history.begin(b"a")
    assert not history.is_due


def test_the_arguments_of_servers():
    found = history_arguments(HistoryDrafts(num_tokens=6), {"tp_size": 2})
    assert found == {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 6,
        "speculative_ngram_external_sam_budget": 5,
        "speculative_ngram_max_bfs_breadth": 1,
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"speculative_algorithm": "EAGLE"}, "leave one of the two out"),
        ({"speculative_num_draft_tokens": 4}, "num_tokens="),
        ({"skip_tokenizer_init": True}, "tokenizer"),
    ],
)
def test_arguments_that_do_not_go_with_them(given, why):
    with pytest.raises(ConfigurationError, match=why):
        history_arguments(HistoryDrafts(), given)


@pytest.mark.parametrize(
    ("drafts", "why"),
    [
        ("past", "'past' is not 'history'"),
        (True, "HistoryDrafts"),
        (HistoryDrafts(num_tokens=1), "num_tokens"),
        (HistoryDrafts(max_tokens=10**7), "at most 4500000"),
        (HistoryDrafts(least_length=-1.0), "least_length"),
    ],
)
def test_what_drafts_may_be(drafts, why):
    with pytest.raises(ConfigurationError, match=why):
        to_history_drafts(drafts)


@pytest.mark.parametrize("device", ["cpu", None])
def test_they_are_for_gpus(tiny_model_path, device):
    if device is None and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigurationError, match="NVIDIA GPUs"):
        AsyncSGLang.from_pretrained(tiny_model_path, device=device, drafts="history")

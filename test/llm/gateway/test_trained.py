"""What a turn keeps of its request, and which turns are trained."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.gateway_client import CHAT, MESSAGES, message, post

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError

ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
AS_ANTHROPIC = [{"name": "add", "input_schema": ADD["parameters"]}]
KNOWN = {"user": "u", "metadata": {"run": "1"}}


def talk(session):
    """Four turns: a title, and three of a conversation, the second one by "small"."""
    post(session, messages=[{"role": "user", "content": "Title?"}], model="small")
    messages = [{"role": "user", "content": "hello"}]
    for model in ("policy", "small", "policy"):
        said = message(post(session, messages=messages, model=model))
        messages += [said, {"role": "user", "content": "Go."}]
    post(session, messages=[*messages, {"role": "user", "content": "S?"}], model="s")
    return session


@pytest.mark.parametrize(
    ("path", "body", "user"),
    [
        ("chat/completions", {**KNOWN, "tools": TOOLS}, "u"),
        ("chat/completions", {"safety_identifier": "s", "tools": TOOLS}, "s"),
        ("completions", {"prompt": "a", **KNOWN}, "u"),
        ("messages", {"metadata": {"user_id": "me"}, "tools": AS_ANTHROPIC}, "me"),
        ("messages", {"stream": True}, None),
    ],
)
def test_a_turn_keeps_what_the_request_says(fake_engine, tmp_path, path, body, user):
    with Gateway(fake_engine, path=tmp_path / "s", trained="my-.*") as gateway:
        session = gateway.session("a")
        named = {"x-client-request-id": "r-1"}
        answer = post(session, f"/v1/{path}", model="my-model", headers=named, **body)
        assert answer.headers["x-request-id"] == "r-1"
        assert answer.headers["request-id"] == "r-1"
    with Gateway(fake_engine, path=tmp_path / "s", trained="my-.*") as gateway:
        (turn,) = gateway.find(name="a").turns
        assert (turn.model, turn.user, turn.request_id) == ("my-model", user, "r-1")
        assert turn.metadata == body.get("metadata", {})
        names = [tool["function"]["name"] for tool in turn.tools]
        assert names == ["add"] * ("tools" in body)
        (row,) = gateway.to_tensordict()
    request = row["request"]
    assert (request["model"], request["user"]) == ("my-model", user or "")
    assert request["request_id"] == "r-1"
    assert json.loads(request["metadata"]) == body.get("metadata", {})


def test_a_request_without_a_name_gets_one(fake_engine):
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
        named = {"Idempotency-Key": "k"}
        first, again, other = (
            post(session, headers=given)
            for given in (named, named, {"x-request-id": "a b"})
        )
        names = [turn.request_id for turn in session.turns]
    assert names[0].startswith("req_")
    assert names[0] == first.headers["x-request-id"] == again.headers["x-request-id"]
    assert names[1] == other.headers["x-request-id"] != "a b"


def test_metadata_that_is_none_is_refused(fake_engine):
    with Gateway(fake_engine) as gateway:
        for path in (CHAT, MESSAGES):
            answer = post(gateway.session(), path, metadata=["a"])
            assert "metadata=['a'] must be an object" in answer.text


RULES = [
    "policy|other",
    lambda turn: turn.model == "policy" and not turn.tools,
]


@pytest.mark.parametrize("rule", RULES)
def test_untrained_turns_are_masked_or_no_row(fake_engine, rule):
    """The title and the summary are no rows, the turn between is masked."""
    with Gateway(fake_engine, trained=rule) as gateway:
        session = talk(gateway.session())
        _, first, between, last, _ = session.turns
        (trajectory,) = session.trajectories()
        assert trajectory.trained == [True, False, True]
        (row,) = gateway.to_tensordict()
    assert row["tokens"].full.tolist() == last.token_ids
    expected = torch.zeros(last.num_tokens, dtype=torch.bool)
    for turn in (first, last):
        expected[turn.prompt.num_tokens : turn.num_tokens] = True
    assert expected.sum() == 8
    assert between.prompt.origin is first
    assert row["masks"].all_assistant_mask.equal(expected)
    assert row["log_probs"].full.isfinite().equal(expected)
    assert row["next", "done"].item()


def test_sessions_of_which_nothing_is_trained_have_no_row(fake_engine):
    with Gateway(fake_engine, trained="other") as gateway:
        session = talk(gateway.session())
        assert session.trajectories() == []
        with pytest.raises(ConfigurationError, match="models 'policy', 's', 'small'"):
            gateway.to_tensordict()


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("(", "not a regular expression"),
        (3, "function of a turn"),
        (lambda turn: turn.nothing, "failed on turn 0 with model='m'"),
        (lambda turn: 1, "returned 1 for a turn"),
    ],
)
def test_invalid_rules_are_refused(fake_engine, rule, told):
    def export():
        with Gateway(fake_engine, trained=rule) as gateway:
            post(gateway.session())
            return gateway.to_tensordict()

    with pytest.raises(ConfigurationError, match=told):
        export()

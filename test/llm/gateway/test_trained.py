"""What a turn keeps of its request, and which turns are trained."""

from __future__ import annotations

import json

import pytest
import requests
import torch
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import CorrectedGRPOLoss, Gateway
from torchrl_sglang.errors import ConfigurationError

ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
LOG_PROB = -1.5
"""That of all tokens of the fake server."""


def post(session, path="chat/completions", *, headers=(), **body):
    given = {"model": "policy", "max_tokens": 4, **body}
    if "prompt" not in given:
        given.setdefault("messages", [{"role": "user", "content": "hello"}])
    answer = requests.post(
        f"{session.base_url}/{path}", json=given, headers=dict(headers), timeout=30
    )
    answer.raise_for_status()
    return answer


def talk(session):
    """Four turns: a title, and three of a conversation, the second one by "small"."""
    post(session, messages=[{"role": "user", "content": "Title?"}], model="small")
    messages = [{"role": "user", "content": "hello"}]
    for model in ("policy", "small", "policy"):
        said = post(session, messages=messages, model=model).json()
        messages += [said["choices"][0]["message"], {"role": "user", "content": "Go."}]
    post(session, messages=[*messages, {"role": "user", "content": "S?"}], model="s")
    return session


@pytest.mark.parametrize(
    ("path", "body", "user"),
    [
        (
            "chat/completions",
            {"user": "u", "metadata": {"run": "1"}, "tools": TOOLS},
            "u",
        ),
        ("chat/completions", {"safety_identifier": "s", "tools": TOOLS}, "s"),
        ("completions", {"prompt": "a", "user": "u", "metadata": {"run": "1"}}, "u"),
        ("messages", {"metadata": {"user_id": "me"}, "tools": [{**ADD}]}, "me"),
        ("messages", {"stream": True}, None),
    ],
)
def test_a_turn_keeps_what_the_request_says(fake_engine, tmp_path, path, body, user):
    if path == "messages" and "tools" in body:
        schema = {"type": "object", "properties": {}}
        body = {**body, "tools": [{"name": "add", "input_schema": schema}]}
    with Gateway(fake_engine, path=tmp_path / "s", trained="my-.*") as gateway:
        session = gateway.session("a")
        named = {"x-client-request-id": "r-1"}
        answer = post(session, path, model="my-model", headers=named, **body)
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
        for path in ("chat/completions", "messages"):
            with pytest.raises(requests.HTTPError) as caught:
                post(gateway.session(), path, metadata=["a"])
            assert "metadata=['a'] must be an object" in caught.value.response.text


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


def test_untrained_turns_have_no_gradient(fake_engine, hf_model, tokenizer):
    with torch.no_grad():
        hf_model.lm_head.weight.mul_(0.02)
        hf_model.lm_head.weight[5:40].mul_(4)
    with Gateway(fake_engine, trained="policy") as gateway:
        session = talk(gateway.session())
        batch = gateway.to_tensordict()
    batch["advantage"] = torch.ones(1, 1, 1)
    actor = TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    loss = CorrectedGRPOLoss(
        actor, clip_epsilon=0.2, entropy_bonus=False, masking_strategy="rlhf"
    )
    turns = [turn for turn in session.turns if turn.model == "policy"]
    ids = torch.tensor(turns[-1].token_ids)
    scores = hf_model(ids[None, :-1]).logits[0].log_softmax(-1)
    ratios = torch.stack(
        [
            (scores[position - 1, ids[position]] - LOG_PROB).exp()
            for turn in turns
            for position in range(turn.prompt.num_tokens, turn.num_tokens)
        ]
    )
    objective = -torch.minimum(ratios, ratios.clamp(0.8, 1.2)).mean()
    parameters = list(hf_model.parameters())
    wanted = torch.autograd.grad(objective, parameters)
    found = torch.autograd.grad(loss(batch).loss_objective, parameters)
    assert max(each.abs().max() for each in wanted) > 1e-3
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


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
        (lambda turn: turn.nothing, "failed on turn 0 with model='policy'"),
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

"""What a session becomes in TorchRL's layout, and that it can be trained on."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import load_from_disk
from helpers.gateway_client import message, post
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang import (
    CorrectedGRPOLoss,
    Gateway,
    OffPolicyCorrection,
    RunRecorder,
    dataset_to_batch,
    load_rollouts,
)
from torchrl_sglang.errors import ConfigurationError

CLIP = 0.2
LOG_PROB = -1.5
"""That of all tokens of the fake server."""


@pytest.fixture
def gateway(fake_engine):
    with Gateway(fake_engine) as gateway:
        yield gateway


def talk(gateway, name, *, group="g", reward=0.0, branch=True):
    """Returns a session of three turns, two of which begin with the first."""
    session = gateway.session(name, group=group)
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}, "id": "1"}
    messages = [
        {"role": "user", "content": f"I am {name}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    messages.append(message(post(session, messages=messages)))
    for question in ("more", "less")[: 1 + branch]:
        asked = [*messages, {"role": "user", "content": question}]
        assert post(session, messages=asked).ok
    gateway.set_reward(session, reward)
    return session


def expected_rows(session):
    """Yields tokens and trained positions of each path."""
    first, *others = session.turns
    for number, turn in enumerate(others):
        spans = [(turn, True), (first, number == 0)]
        yield (
            turn.token_ids,
            {
                position
                for part, trained in spans
                for position in range(len(part.prompt.token_ids), len(part.token_ids))
                if trained
            },
        )


def test_the_layout(gateway):
    session = talk(gateway, "a", reward=1.0)
    gateway.set_reward(session, 0.5, turn=2)
    batch = gateway.to_tensordict()
    assert batch.shape == (2,)
    expected = list(expected_rows(session))
    length = len(session.turns[0].prompt.token_ids)
    for row, (ids, trained) in zip(batch, expected, strict=True):
        mask = torch.tensor([i in trained for i in range(len(ids))])
        assert row["tokens"].full.tolist() == ids
        assert row["tokens"].prompt.tolist() == ids[:length]
        assert row["tokens"].response.tolist() == ids[length:]
        assert torch.equal(row["masks"].all_assistant_mask, mask)
        assert row["masks"].all_attention_mask.all()
        assert torch.equal(row["log_probs"].full.isfinite(), mask)
        assert (row["log_probs"].full[mask] == LOG_PROB).all()
        assert row["log_probs"].response.shape == (len(ids) - length,)
        info = row["generation_info"]
        assert info.weight_version.tolist() == [-1] * (len(ids) - length)
        assert info.finish_reason == "length"
        assert info.truncated
        history = row["history"]
        assert list(history.prompt.role) == ["user", "assistant", "tool"]
        assert list(history.full.role) == [
            *("user", "assistant", "tool", "assistant", "user", "assistant")
        ]
        assert history.full.content[3] == session.turns[0].text
        assert len(history.response.content) == 3
        assert (row["session"], row["group"]) == ("a", "g")
    assert batch["next", "reward"].flatten().tolist() == [1.0, 1.5]
    assert batch["next", "done"].flatten().tolist() == [False, True]
    assert not batch["done"].any()
    assert batch["policy_version"].tolist() == [-1, -1]


def test_unknown_log_probs_are_nan(gateway):
    session = talk(gateway, "a", branch=False)
    session.turns[1].completion.log_probs[2] = math.nan
    (row,) = gateway.to_tensordict()
    known = row["log_probs"].full[row["masks"].all_assistant_mask].isfinite()
    assert known.tolist() == [True] * 6 + [False, True]


def test_versions_are_those_of_the_tokens(gateway, fake):
    fake.weight_version = "7"
    talk(gateway, "a")
    for row in gateway.to_tensordict():
        versions = row["generation_info"].weight_version
        assert set(versions.tolist()) == {-1, 7}
        assert row["policy_version"] == 7


def test_sessions_without_a_turn_are_refused(gateway):
    gateway.session("a")
    with pytest.raises(ConfigurationError, match="No turn was recorded"):
        gateway.to_tensordict()


def make_buffer(size=100):
    return ReplayBuffer(
        storage=LazyStackStorage(size),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(2, prompt_key="group", trajectory_return="mean"),
        batch_size=4,
    )


def groups(gateway):
    """Makes two groups; the sessions have one or two rows."""
    for index, reward in enumerate([0.0, 1.0, 3.0, 1.0]):
        talk(
            gateway,
            f"{index}",
            group=f"g{index // 2}",
            reward=reward,
            branch=index % 2 == 0,
        )
    return gateway.to_tensordict()


def test_groups_of_sessions_have_advantages(gateway):
    buffer = make_buffer()
    buffer.extend(groups(gateway))
    assert len(buffer) == 6
    half = 1 / math.sqrt(2)
    advantages = {
        row["session"]: round(row["advantage"].item(), 3) for row in buffer[:]
    }
    assert advantages == pytest.approx(
        {"0": -half, "1": half, "2": half, "3": -half}, abs=1e-3
    )
    assert buffer.sample().shape == (4,)


def gradient(model, objective):
    found = torch.autograd.grad(objective, list(model.parameters()), allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def by_hand(model, batch, gateway, term):
    """Returns the mean of a token's term over all trained tokens."""
    terms = []
    expected = {
        tuple(ids): trained
        for session in gateway.sessions
        for ids, trained in expected_rows(session)
    }
    for row in batch:
        ids = row["tokens"].full
        scores = model(ids[None, :-1]).logits[0].log_softmax(-1)
        advantage = row["advantage"].item()
        terms += [
            term(scores[position - 1, ids[position]], advantage)
            for position in expected[tuple(ids.tolist())]
        ]
    return torch.stack(terms).mean()


def clipped(score, advantage):
    ratio = (score - LOG_PROB).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def truncated(score, advantage):
    """The token TIS of verl, with one step per batch."""
    weight = (score.detach() - LOG_PROB).exp().clamp(max=2.0)
    return -weight * advantage * score


@pytest.fixture
def actor(hf_model, tokenizer):
    # Random weights as large as the tests' give ratios that are all clipped.
    with torch.no_grad():
        hf_model.lm_head.weight.mul_(0.02)
        hf_model.lm_head.weight[5:40].mul_(4)
    return TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )


def train_batch(gateway):
    buffer = make_buffer()
    buffer.extend(groups(gateway))
    return buffer[:]


@pytest.mark.parametrize("kind", [CorrectedGRPOLoss, TorchRLGRPOLoss])
@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_each_trained_token_has_its_gradient(gateway, hf_model, actor, kind, strategy):
    batch = train_batch(gateway)
    loss = kind(
        actor, clip_epsilon=CLIP, entropy_bonus=False, masking_strategy=strategy
    )
    objective = loss(batch).loss_objective
    wanted = by_hand(hf_model, batch, gateway, clipped)
    torch.testing.assert_close(objective, wanted, atol=1e-5, rtol=1e-4)
    found, expected = gradient(hf_model, objective), gradient(hf_model, wanted)
    assert expected.norm() > 0.01
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_with_off_policy_correction(gateway, hf_model, actor):
    batch = train_batch(gateway)
    options = {"clip_epsilon": CLIP, "masking_strategy": "rlhf"}
    correct = OffPolicyCorrection(
        "decoupled_token_is", actor_network=actor, masking_strategy="rlhf"
    )
    loss = CorrectedGRPOLoss(actor, entropy_bonus=False, **options)
    objective = loss(correct(batch)).loss_objective
    expected = gradient(hf_model, by_hand(hf_model, batch, gateway, truncated))
    found = gradient(hf_model, objective)
    assert expected.norm() > 0.01
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_a_dataset_of_sessions_comes_back_as_their_rows(gateway, tmp_path):
    sessions = [talk(gateway, "one", reward=2.0), talk(gateway, "two", branch=False)]
    gateway.to_dataset(sessions).save_to_disk(tmp_path / "rows")
    dataset = load_from_disk(tmp_path / "rows")
    rows = gateway.to_tensordict(sessions)
    assert dataset["session"] == ["one", "one", "two"]
    assert dataset["reward"] == [2.0, 2.0, 0.0]
    for row, back in zip(rows, dataset_to_batch(dataset), strict=True):
        keys = set(row.keys(include_nested=True, leaves_only=True))
        assert keys == set(back.keys(include_nested=True, leaves_only=True))
        for key in keys:
            value, other = row.get(key), back.get(key)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)
            else:
                assert other.tolist() == value.tolist()


def test_metrics_and_empty_responses_come_back_from_a_dataset(gateway):
    session, empty = talk(gateway, "one"), gateway.session("two")
    gateway.set_metrics(session, {"length": 3.0, "reward": 9.0})
    asked = [{"role": "user", "content": "hi"}]
    assert post(empty, messages=asked, max_tokens=0).ok
    dataset = gateway.to_dataset()
    assert dataset["metrics.length"] == [3.0, 3.0, None]
    *rows, last = dataset_to_batch(dataset)
    for row in rows:
        assert row["next", "metrics", "length"].item() == 3.0
        assert row["next", "metrics", "reward"].item() == 9.0
    assert "metrics" not in last["next"].keys()
    assert last["generation_info"].weight_version.dtype == torch.int64


def test_a_file_and_a_recording_become_the_dataset_of_their_sessions(
    fake_engine, tmp_path
):
    path, recorder = tmp_path / "sessions.db", RunRecorder(tmp_path / "run")
    with recorder, Gateway(fake_engine, path=path, recorder=recorder) as gateway:
        sessions = [talk(gateway, name, reward=2.0) for name in ("one", "two")]
        gateway.set_reward(sessions[0], 0.5, turn=2)
        with pytest.raises(ConfigurationError, match="another gateway has it open"):
            load_rollouts(path)
        expected = gateway.to_dataset()
    from_file = load_rollouts(path)
    assert from_file.features == expected.features
    assert from_file.to_list() == expected.to_list()
    recorded = load_rollouts(tmp_path / "run")
    for name in (
        *("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward", "done"),
        *("terminated", "truncated", "session", "weight_versions", "policy_version"),
    ):
        assert recorded.features[name] == expected.features[name], name
        assert recorded[name] == expected[name], name
    for name in ("prompt", "completion"):
        for rows in zip(recorded[name], expected[name], strict=True):
            first, second = ([m["role"] for m in messages] for messages in rows)
            assert first == second


def test_the_rules_of_a_gateway_hold_for_its_file(fake_engine, tmp_path):
    path, rules = tmp_path / "sessions.db", {"trained": "none", "discount": 0.5}
    with Gateway(fake_engine, path=path, **rules) as gateway:
        talk(gateway, "one", reward=2.0)
    with pytest.raises(ConfigurationError, match="no session with a trained turn"):
        load_rollouts(path, **rules)
    assert load_rollouts(path, discount=0.5)["reward"] == [1.0, 1.0]


def test_paths_without_rows_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_rollouts(tmp_path / "nothing")
    (tmp_path / "text").write_text("no database")
    with pytest.raises(ConfigurationError, match="cannot be used as a file"):
        load_rollouts(tmp_path / "text")
    RunRecorder(tmp_path, prompts=False).close()
    with pytest.raises(ConfigurationError, match="None of 0 groups"):
        load_rollouts(tmp_path)
    with pytest.raises(ConfigurationError, match="a gateway's file"):
        load_rollouts(tmp_path, discount=0.5)

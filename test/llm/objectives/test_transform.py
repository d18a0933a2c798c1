"""OffPolicyCorrection on batches: layouts, columns, replay buffers, real models."""

from __future__ import annotations

import pickle

import pytest
import torch
from helpers.log_probs import score
from helpers.sampled_batches import TableActor, make_batch, make_case
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from torchrl_sglang import (
    CorrectedGRPOLoss,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
    SGLangWrapper,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS


def full(batch, key: str = "log_probs") -> torch.Tensor:
    return batch.get(
        (key, "full"), as_padded_tensor=True, padding_side="left", padding_value=0.0
    )


@pytest.mark.parametrize("layout", ["ragged", "ragged inside", "padded", "nested"])
@pytest.mark.parametrize("release", ["present", "0.17"])
def test_columns_do_not_depend_on_the_release_of_tensordict(
    monkeypatch, release, layout
):
    """From 0.17 on, a dense batch gives a list where it is asked for one."""
    case, get = make_case(2), TensorDict.get
    expected = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")(
        make_batch(case, "ragged")
    )

    def get_list(self, key, *args, as_list=False, **kwargs):
        value = get(self, key, *args, as_list=as_list, **kwargs)
        is_dense = as_list and isinstance(value, torch.Tensor)
        return list(value.unbind(0)) if is_dense else value

    if release == "0.17":
        monkeypatch.setattr(TensorDict, "get", get_list)
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    batch = correct(make_batch(case, layout))
    lengths = [len(row.prompt) + len(row.tokens) for row in case.rows]
    for row, length, old in zip(
        batch.unbind(0), lengths, expected.unbind(0), strict=True
    ):
        found = row["log_probs", "full"]
        width = length if layout.startswith("ragged") else case.width
        assert found.shape == (width,)
        torch.testing.assert_close(
            found[-length:], old["log_probs", "full"], equal_nan=True
        )
    assert not getattr(batch["advantage"], "is_nested", False)
    loss = CorrectedGRPOLoss(TableActor(case.logits), masking_strategy="rlhf")
    assert loss(batch).loss_objective.isfinite()


@pytest.mark.parametrize("layout", ["ragged", "padded", "nested"])
def test_the_batch_that_goes_in_is_not_changed(layout):
    case = make_case(2)
    batch, untouched = make_batch(case, layout), make_batch(case, layout)
    correct = OffPolicyCorrection("decoupled_seq_is_rs", masking_strategy="rlhf")
    result = correct(batch)
    for key in (("log_probs", "full"), "advantage"):
        before = batch.get(key, as_list=True)
        expected = untouched.get(key, as_list=True)
        for row, other in zip(before, expected, strict=True):
            torch.testing.assert_close(row, other, equal_nan=True)
    assert result["advantage"].shape == (len(case.rows), case.width, 1)
    assert set(result.keys(True)) == set(batch.keys(True))


def test_an_advantage_per_token():
    case = make_case(2)
    batch = make_batch(case, "ragged")
    rows = []
    for row, source in zip(batch.unbind(0), case.rows, strict=True):
        length = len(source.prompt) + len(source.tokens)
        advantage = torch.arange(1.0, length + 1).view(-1, 1)
        rows.append(row.clone().set("advantage", advantage))
    correct = OffPolicyCorrection("bypass_ppo_clip", masking_strategy="rlhf")
    result = correct(lazy_stack(rows))["advantage"].squeeze(-1)
    for row, source in zip(result, case.rows, strict=True):
        length, prompt = len(source.prompt) + len(source.tokens), len(source.prompt)
        start = case.width - length
        assert not row[: start + prompt].any()
        assert row[start + prompt :].tolist() == list(range(prompt + 1, length + 1))


def test_a_replay_buffer_corrects_what_is_sampled():
    case = make_case(2)
    batch = make_batch(case, "ragged")
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(case.rows)),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=correct,
        batch_size=len(case.rows),
    )
    buffer.extend(batch)
    expected = correct(batch)
    # The second time, too: what is stored is not what was corrected.
    for _ in range(2):
        sample = buffer.sample()
        torch.testing.assert_close(sample["advantage"], expected["advantage"])
        torch.testing.assert_close(full(sample), full(expected), equal_nan=True)


def test_a_replay_buffer_computes_the_advantage_before():
    case = make_case(2)
    rows = []
    for row in make_batch(case, "ragged").exclude("advantage").unbind(0):
        reward = torch.tensor([[float(len(rows))]])
        done = torch.ones(1, 1, dtype=torch.bool)
        outcome = TensorDict(reward=reward, done=done)
        rows.append(TensorDict({**row, "query": "count", "next": outcome}))
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    count = len(rows)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(count),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=Compose(MCAdvantage(grpo_size=count), correct),
        batch_size=count,
    )
    done = torch.ones(count, 1, 1, dtype=torch.bool)
    batch = lazy_stack(rows).set(("next", "done"), done)
    buffer.extend(batch)
    advantage = buffer.sample()["advantage"].squeeze(-1)
    assert advantage.shape == (count, case.width)
    # Rewards grow with the row, so that the first is below the mean.
    assert advantage[0].min() < 0 == advantage[0].max()
    assert advantage[-1].max() > 0 == advantage[-1].min()


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_a_trainer_in_bfloat16(proximal):
    case = make_case(2)
    batch = make_batch(case, "padded")
    for key in ("log_probs", "train_log_probs"):
        dtype = torch.float32 if key == "log_probs" else torch.bfloat16
        batch.set((key, "full"), batch[key, "full"].to(dtype))
    config = RolloutCorrectionConfig(rollout_is="token", proximal=proximal)
    correct = OffPolicyCorrection(config, masking_strategy="rlhf", consumer_version=4)
    found = correct(batch)
    expected = correct(make_batch(case, "padded"))
    assert found["log_probs", "full"].dtype == torch.float32
    torch.testing.assert_close(
        found["advantage"], expected["advantage"], atol=0.05, rtol=0.05
    )


def test_one_version_for_each_row():
    case = make_case(2)
    batch = make_batch(case, "ragged")
    count = len(case.rows)
    versions = torch.arange(count).view(-1, 1)
    batch.set("next", TensorDict(policy_version=versions, batch_size=count))
    correct = OffPolicyCorrection(
        RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, max_staleness=1),
        masking_strategy="rlhf",
        version_key=("next", "policy_version"),
        consumer_version=count - 1,
    )
    kept = (correct(batch)["advantage"] != 0).any(1).squeeze(-1)
    assert kept.tolist() == [index >= count - 2 for index in range(count)]


def test_the_version_follows_the_trainer():
    case = make_case(2)
    config = RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, max_staleness=0)
    correct = OffPolicyCorrection(config, masking_strategy="rlhf", consumer_version=0)
    batch = make_batch(case, "ragged")
    dropped = []
    newest = max(int(row[POLICY_VERSIONS].max()) for row in batch.unbind(0))
    for version in range(newest, newest + 8):
        correct.consumer_version = version
        correct(batch)
        dropped.append(correct.metrics["rollout_corr/stale_masked_fraction"])
    assert dropped == sorted(dropped)
    assert dropped[0] < dropped[-1] == 1


@pytest.mark.parametrize(
    ("arguments", "missing", "message"),
    [
        ({}, "train_log_probs", "give actor_network"),
        ({}, "log_probs", "return_log_probs=True"),
        ({}, "advantage", "MCAdvantage"),
        ({}, "masks", "masking_strategy='rlhf' needs"),
        ({"max_staleness": 1}, POLICY_VERSIONS, "return_generation_info=True"),
        ({"max_staleness": 1}, None, "consumer_version"),
        ({"proximal": "interpolated"}, None, "consumer_version"),
    ],
)
def test_what_a_batch_lacks(arguments, missing, message):
    batch = make_batch(make_case(2), "ragged")
    if missing is not None:
        batch = batch.exclude(missing)
    config = RolloutCorrectionConfig(**arguments)
    with pytest.raises(ConfigurationError, match=message):
        OffPolicyCorrection(config, masking_strategy="rlhf")(batch)


def test_shapes_that_do_not_fit():
    batch = make_batch(make_case(2), "padded")
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    with pytest.raises(ConfigurationError, match="one batch dimension"):
        correct(batch.unsqueeze(0))
    wrong = batch.clone().set("advantage", torch.zeros(len(batch), 2, 1))
    with pytest.raises(ConfigurationError, match="one value per sequence or per token"):
        correct(wrong)
    short = batch["train_log_probs", "full"][:, 1:]
    with pytest.raises(ConfigurationError, match="not of the same tokens"):
        correct(batch.clone().set(("train_log_probs", "full"), short))
    long = torch.zeros(len(batch), 99, dtype=torch.int64)
    stale = OffPolicyCorrection(
        RolloutCorrectionConfig(max_staleness=1),
        masking_strategy="rlhf",
        consumer_version=3,
    )
    with pytest.raises(ConfigurationError, match="99 versions"):
        stale(batch.clone().set(POLICY_VERSIONS, long))


@pytest.mark.parametrize(
    "arguments", [{"masking_strategy": "response"}, {"aggregation": "mean"}]
)
def test_arguments_that_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="is not one of"):
        OffPolicyCorrection("disabled", **arguments)


def test_a_batch_without_any_log_prob():
    batch = make_batch(make_case(2), "padded")
    lost = torch.full_like(full(batch), torch.nan)
    correct = OffPolicyCorrection("bypass_ppo_clip", masking_strategy="rlhf")
    with pytest.raises(ConfigurationError, match="no token whose log-probs are known"):
        correct(batch.set(("log_probs", "full"), lost))


def test_the_actor_is_no_part_of_the_transform():
    actor = TableActor(make_case(2).logits)
    correct = OffPolicyCorrection("disabled", actor_network=actor)
    assert not list(correct.parameters())
    assert not correct.state_dict()


def test_it_can_be_pickled():
    case = make_case(2)
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    copy = pickle.loads(pickle.dumps(correct))
    batch = make_batch(case, "ragged")
    assert torch.equal(copy(batch)["advantage"], correct(batch)["advantage"])


def make_row(prompt: list[int], response: list[int], log_probs: torch.Tensor):
    tokens = torch.tensor([*prompt, *response])
    unknown = torch.full((len(prompt),), torch.nan)
    return TensorDict(
        tokens=Tokens(
            prompt=tokens[: len(prompt)],
            response=tokens[len(prompt) :],
            full=tokens,
            padded=False,
        ),
        masks=Masks(
            all_attention_mask=torch.ones(len(tokens), dtype=torch.bool),
            all_assistant_mask=torch.arange(len(tokens)) >= len(prompt),
            padded=False,
        ),
        log_probs=LogProbs(full=torch.cat([unknown, log_probs]), padded=False),
        advantage=torch.ones(1, 1),
    )


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_a_language_model_computes_its_log_probs(hf_model, tokenizer, strategy):
    """With the actor's own log-probs, the ratio of the loss is 1 for every token."""
    torch.manual_seed(0)
    answers = [([5, 6, 7], [8, 9]), ([5], [10, 11, 12, 13]), ([5, 6], [7])]
    batch = lazy_stack([make_row(p, r, torch.rand(len(r)).log()) for p, r in answers])
    actor = TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    correct = OffPolicyCorrection(
        "decoupled_token_is", actor_network=actor, masking_strategy=strategy
    )
    result = correct(batch)
    weights = []
    for (prompt, response), row, old in zip(
        answers,
        batch.get(("log_probs", "full"), as_list=True),
        result.get(("log_probs", "full"), as_list=True),
        strict=True,
    ):
        start = len(prompt)
        expected = score(hf_model, [*prompt, *response])[start:]
        torch.testing.assert_close(old[start:], expected, atol=1e-4, rtol=0)
        weights += (expected - row[start:]).exp().clamp(max=2).tolist()
    found = result["advantage"][result["advantage"] != 0]
    torch.testing.assert_close(found, torch.tensor(weights), atol=1e-4, rtol=1e-4)
    loss = GRPOLoss(actor, entropy_bonus=False, masking_strategy=strategy)(result)
    assert loss.ESS.item() == pytest.approx(1, abs=1e-5)
    assert loss.kl_approx.item() == pytest.approx(0, abs=1e-6)
    assert -loss.loss_objective.item() == pytest.approx(found.mean().item(), abs=1e-5)


@pytest.mark.parametrize("pad_output", [False, True])
def test_batches_of_the_wrapper_can_be_corrected(fake_engine, pad_output):
    policy = SGLangWrapper(
        fake_engine,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": 3},
        return_log_probs=True,
        return_generation_info=True,
        pad_output=pad_output,
    )
    rows = [
        TensorDict(tokens=Tokens(prompt=torch.tensor(ids))) for ids in ([1, 2, 3], [4])
    ]
    batch = policy(lazy_stack(rows)) if not pad_output else policy(padded_prompts())
    count = len(batch)
    sampled = full(batch)
    batch.set("advantage", torch.ones(count, 1, 1))
    versions = batch.get(("generation_info", "weight_version"), as_list=True)
    info = batch["generation_info"]
    fresh = [torch.arange(len(row)) for row in versions]
    for row, values in zip(info.unbind(0), fresh, strict=True):
        row.weight_version = values
    config = RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, max_staleness=1)
    correct = OffPolicyCorrection(
        config, version_key=("generation_info", "weight_version"), consumer_version=2
    )
    result = correct(batch)
    known = full(result).isfinite() & (full(result) != 0)
    # The last two tokens of each response were written by the last two versions.
    assert known.tolist() == [[False] * (sampled.shape[1] - 2) + [True] * 2] * count
    assert torch.equal(full(result)[known], sampled[known])


def padded_prompts() -> TensorDict:
    prompts = torch.tensor([[1, 2, 3], [0, 0, 4]])
    return TensorDict(tokens=Tokens(prompt=prompts, batch_size=2), batch_size=2)

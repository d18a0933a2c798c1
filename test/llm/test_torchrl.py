"""SGLangWrapper where TorchRL calls it: collectors, pools, KL transforms and GRPO.

TorchRL drives, the real engine answers, and the Hugging Face twin says what is right.
"""

from __future__ import annotations

import functools
import re
import sys
import threading

import cloudpickle
import pytest
import torch
from helpers.collecting import Declare, with_lengths
from helpers.log_probs import TOLERANCE
from helpers.slow import diagonal
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, Unbounded
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import AsyncEnvPool, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import (
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
)
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from torchrl_sglang import SGLangWrapper
from torchrl_sglang.testing.tiny_model import CHAT_TEMPLATE, make_tiny_model

pytestmark = [
    # The environments decide how many turns there are, not the size of a batch.
    pytest.mark.filterwarnings("ignore:frames_per_batch"),
    # TransformersWrapper's loss asks for an argument that torch gave up.
    pytest.mark.filterwarnings("ignore:size_average and reduce args"),
]

QUERIES = ["a 1", "bbb 3", "cc 2", "d 1", "eeee 2"]
TIMEOUT = 60.0
ENDINGS = {"max_new_tokens": 12, "stop_token_ids": list(range(3, 50, 2))}
"""Half of the vocabulary ends a response, so those of a batch differ in length."""


class Tool(Transform):
    """Answers with a length; ends a dialog at the turn that its query's digit says."""

    def _step(self, tensordict, next_tensordict):
        histories = next_tensordict["history"].prompt.unbind(0)
        turns = torch.tensor([[len(one.content) // 2] for one in histories])
        wanted = torch.tensor([[int(one.content[0][-1])] for one in histories])
        history = next_tensordict["history"]
        history.prompt = with_lengths(history.prompt)
        lengths = [[[float(len(one.content[-1]))]] for one in histories]
        next_tensordict["reward"] = torch.tensor(lengths)
        next_tensordict["done"] = turns >= wanted
        next_tensordict["terminated"] = turns >= wanted
        return next_tensordict


def make_env(tokenizer, queries=tuple(QUERIES), batch_size=2, **kwargs):
    """Returns an environment of dialogs that take the queries in their order."""
    stream = list(queries) * 20
    batches = [
        TensorDict(query=stream[i : i + batch_size], batch_size=(batch_size,))
        for i in range(0, len(stream) - batch_size + 1, batch_size)
    ]
    env = ChatEnv.from_dataloader(
        dataloader=batches,
        batch_size=(batch_size,),
        tokenizer=tokenizer,
        input_mode="history",
        **kwargs,
    )
    return env.append_transform(Tool())


def make_policy(engine, tokenizer, **kwargs) -> SGLangWrapper:
    generate_kwargs = {"max_new_tokens": 4, **kwargs.pop("generate_kwargs", {})}
    return SGLangWrapper(
        engine, tokenizer=tokenizer, generate_kwargs=generate_kwargs, **kwargs
    )


def rows(data, *key) -> list[torch.Tensor]:
    return data.get(key, as_list=True)


def check_dialogs(data, tokenizer, score) -> None:
    """Every turn: its tokens, texts and log-probs, and where the dialog stands."""
    data = data.reshape(-1)
    masks = rows(data, "masks", "all_attention_mask")
    answers = rows(data, "masks", "all_assistant_mask")
    fulls = rows(data, "tokens", "full")
    log_probs = rows(data, "log_probs", "full")
    for index in range(len(data)):
        mask = masks[index]
        full = fulls[index][mask]
        answer = answers[index][mask]
        messages = data["history"].full[index]
        prompt, response = full[~answer].tolist(), full[answer].tolist()
        assert len(response) > 0
        assert full.tolist() == prompt + response
        reference = score(full)[answer]
        torch.testing.assert_close(
            log_probs[index][mask][answer], reference, atol=TOLERANCE, rtol=0
        )
        assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
            as_chat(messages)[:-1], tokenize=False, add_generation_prompt=True
        )
        text = tokenizer.decode(response)
        assert data["text"].response[index] == text
        assert messages.content[-1] == text.removesuffix(tokenizer.eos_token)
        turns = len(messages.content) // 2
        assert bool(data["next", "done"][index]) == (turns == wanted_turns(messages))
        seen = data["next", "history"].prompt[index].content
        assert seen == [*messages.content, f"length {len(messages.content[-1])}"]


def as_chat(history) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for role, content in zip(history.role, history.content, strict=True)
    ]


def wanted_turns(history) -> int:
    return int(history.content[0][-1])


def check_complete(data) -> None:
    """Dialogs stand one behind the other, each from its first turn to its end."""
    before: list[str] = []
    for history, done in zip(
        data["history"].full.unbind(0), data["next", "done"], strict=True
    ):
        messages = list(history.content)
        assert messages[: len(before)] == before
        assert len(messages) == max(len(before), 1) + 1
        before = [] if done else [*messages, f"length {len(messages[-1])}"]
    assert not before


# What the collector is asked for, and the shape of what it yields.
FORMS = {
    "steps": ({"dialog_turns_per_batch": 4}, (2, 2)),
    "flat steps": ({"dialog_turns_per_batch": 4, "flatten_data": True}, (4,)),
    "first steps": ({"dialog_turns_per_batch": 2, "reset_at_each_iter": True}, (2, 1)),
    "dialogs": ({"yield_completed_trajectories": True}, None),
    "several dialogs": (
        {"yield_completed_trajectories": True, "dialog_turns_per_batch": 3},
        None,
    ),
    "ends of dialogs": (
        {"yield_only_last_steps": True, "dialog_turns_per_batch": 1},
        None,
    ),
}
COMPLETE = ("dialogs", "several dialogs")


@pytest.mark.parametrize(("form", "pad_output"), diagonal(FORMS, [False, True]))
def test_collector_yields(engine, tokenizer, score, form, pad_output):
    arguments, shape = FORMS[form]
    collector = LLMCollector(
        make_env(tokenizer),
        policy=make_policy(engine, tokenizer, pad_output=pad_output),
        total_dialog_turns=12,
        **arguments,
    )
    turns = 0
    for data in collector:
        assert shape is None or data.shape == shape
        check_dialogs(data, tokenizer, score)
        if form in COMPLETE:
            check_complete(data)
        if form == "ends of dialogs":
            assert data["next", "done"].all()
            turns += sum(map(wanted_turns, data["history"].full.unbind(0)))
        else:
            turns += data.numel()
    assert turns >= 12
    collector.shutdown()


@pytest.mark.parametrize("form", ["steps", "dialogs", "ends of dialogs"])
def test_collector_fills_a_buffer(engine, tokenizer, score, form):
    buffer = ReplayBuffer(storage=LazyStackStorage(32), batch_size=4)
    collector = LLMCollector(
        make_env(tokenizer),
        policy=make_policy(engine, tokenizer),
        total_dialog_turns=8,
        replay_buffer=buffer,
        **FORMS[form][0],
    )
    assert all(data is None for data in collector)
    check_dialogs(buffer[:], tokenizer, score)
    check_dialogs(buffer.sample(), tokenizer, score)
    if form == "dialogs":
        check_complete(buffer[:])
    collector.shutdown()


@pytest.mark.parametrize("form", ["steps", "dialogs"])
def test_collector_in_the_background(engine, tokenizer, score, form):
    """The thread fills the buffer while this one reads it."""
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=4)
    enough = threading.Event()

    def watch(data):
        # Called before the batch is stored: the one before it is.
        if len(buffer) >= 8:
            enough.set()
        return data

    collector = LLMCollector(
        make_env(tokenizer),
        policy=make_policy(engine, tokenizer),
        replay_buffer=buffer,
        postproc=watch,
        **FORMS[form][0],
    )
    collector.start()
    assert enough.wait(TIMEOUT)
    check_dialogs(buffer.sample(), tokenizer, score)
    collector.async_shutdown(timeout=TIMEOUT)
    assert not collector.is_running()
    check_dialogs(buffer[:], tokenizer, score)


@pytest.mark.parametrize("pad_output", [False, True])
def test_collector_keeps_the_tokens_of_a_dialog(engine, tokenizer, score, pad_output):
    """Tool use with ``prefer_tokens``: a dialog goes on, the next one starts anew."""
    collector = LLMCollector(
        make_env(tokenizer),
        policy=make_policy(
            engine, tokenizer, prefer_tokens=True, pad_output=pad_output
        ),
        yield_completed_trajectories=True,
        total_dialog_turns=12,
    )
    for data in collector:
        check_dialogs(data, tokenizer, score)
        before: list[int] = []
        for index, full in enumerate(rows(data, "tokens", "full")):
            ids = full[rows(data, "masks", "all_attention_mask")[index]].tolist()
            assert ids[: len(before)] == before
            before = [] if data["next", "done"][index] else ids
    collector.shutdown()


# A pool of dialogs of different lengths steps each environment when it is ready.
# Only lazy stacks hold ragged rows. The pool's step() and step_and_maybe_reset(), and
# so collectors that yield steps, take environments without a batch dimension only,
# and ChatEnv always has one.
POOL = [("a 1",), ("bbb 3",), ("cc 2",)]


def make_pool(tokenizer, **kwargs) -> AsyncEnvPool:
    makers = [
        CloudpickleWrapper(
            functools.partial(make_env, tokenizer, queries, batch_size=1)
        )
        for queries in POOL
    ]
    return AsyncEnvPool(makers, stack="lazy", **kwargs)


@pytest.mark.parametrize(
    "pool_kwargs",
    [
        pytest.param({"backend": "threading"}, id="threading"),
        pytest.param(
            {"backend": "multiprocessing", "exchange": "queue", "envs_per_worker": 2},
            id="multiprocessing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pool(engine, tokenizer, score, pool_kwargs):
    # Other processes cannot import this module by its name.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = make_pool(tokenizer, **pool_kwargs)
    policy = make_policy(engine, tokenizer)
    pool.async_step_and_maybe_reset_send(policy(pool.reset()))
    finished = set()
    while finished < {query for (query,) in POOL}:
        data, following = pool.async_step_and_maybe_reset_recv(min_get=1, max_get=2)
        check_dialogs(data, tokenizer, score)
        for row in data.reshape(-1).unbind(0):
            if row["next", "done"]:
                finished.add(row["history"].full.content[0])
        pool.async_step_and_maybe_reset_send(policy(following))
    pool.async_step_and_maybe_reset_recv(min_get=len(POOL))
    pool.close()


# LLMCollector takes no pool of processes: their specs arrive without the keys of
# histories, so that it finds no action. It takes no queue where Ray is not installed.
@pytest.mark.parametrize(
    ("form", "buffered"), diagonal(["dialogs", "ends of dialogs"], [False, True])
)
def test_collector_of_a_pool(engine, tokenizer, score, form, buffered):
    buffer = ReplayBuffer(storage=LazyStackStorage(64)) if buffered else None
    collector = LLMCollector(
        make_pool(tokenizer, backend="threading"),
        policy=make_policy(engine, tokenizer),
        replay_buffer=buffer,
        **FORMS[form][0],
    )
    assert collector.async_envs
    finished = []
    for data in collector:
        batch = buffer[:] if buffered else data
        check_dialogs(batch, tokenizer, score)
        if form == "dialogs":
            check_complete(batch)
        else:
            assert batch["next", "done"].all()
        finished += [one.content[0] for one in batch["history"].full.unbind(0)]
        if set(finished) == {query for (query,) in POOL}:
            break
    collector.shutdown()


# --- KL -------------------------------------------------------------------------


class NoReward(Transform):
    """Gives a reward of zero for each token to come."""

    def _step(self, tensordict, next_tensordict):
        next_tensordict["reward"] = torch.zeros(*next_tensordict.shape, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


@pytest.fixture
def new_model(tokenizer):
    """A model that the engine does not serve."""
    return make_tiny_model(tokenizer, seed=11)


def make_scorer(wrapped, tokenizer, **kwargs):
    """Returns a wrapper that scores, of a model or of the engine."""
    is_model = isinstance(wrapped, torch.nn.Module)
    wrapper = TransformersWrapper if is_model else SGLangWrapper
    return wrapper(wrapped, tokenizer=tokenizer, generate=False, **kwargs)


@torch.no_grad()
def score_with(model, ids, bias=None) -> torch.Tensor:
    """Log-probability of each token under a model; 0.0 for the first."""
    ids = torch.as_tensor(ids)
    logits = model(ids[None]).logits[0, :-1]
    for token, value in (bias or {}).items():
        logits[:, token] += value
    log_probs = logits.log_softmax(-1)
    return torch.cat([torch.zeros(1), log_probs.gather(-1, ids[1:, None])[:, 0]])


def step(env, policy, queries=("hi 2", "what is 2+2? 2")):
    """Returns the data of the first turn."""
    td = TensorDict(query=list(queries), batch_size=(len(queries),))
    # Ragged values fit into a lazy stack only.
    data, _ = env.step_and_maybe_reset(policy(env.reset(td.to_lazystack(0))))
    return data


def template(data, tokenizer) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens of each conversation and which of them are the assistant's."""
    found = []
    for history in data["history"].full.unbind(0):
        encoded = tokenizer.apply_chat_template(
            as_chat(history), return_dict=True, return_assistant_tokens_mask=True
        )
        mask = torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        found.append((encoded["input_ids"], mask))
    return found


def check_rows(actual, expected) -> None:
    """Rows equal those expected; what is longer is padding, which is zero."""
    assert len(actual) == len(expected)
    for row, wanted in zip(actual, expected, strict=True):
        padding = len(row) - len(wanted)
        padded = torch.nn.functional.pad(wanted, (padding, 0))
        torch.testing.assert_close(row, padded, atol=TOLERANCE, rtol=0)


# Its generation prompt begins reasoning, which complete turns lack.
WITHOUT_BLOCKS = re.sub(r"{% (end)?generation %}", "", CHAT_TEMPLATE).replace(
    "assistant\\n'", "assistant\\n<think>\\n'"
)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize(
    ("assistant_only", "source"),
    [(False, None), (True, None), (True, WITHOUT_BLOCKS)],
    ids=["all", "assistant", "assistant, no blocks"],
)
def test_retrieve_log_prob(
    engine, tokenizer, score, pad_output, assistant_only, source
):
    """The reference model's log-probs of whole conversations, in a ChatEnv."""
    reference = make_scorer(
        engine,
        tokenizer,
        pad_output=pad_output,
        log_probs_key="ref",
        chat_template=source,
    )
    env = ChatEnv(batch_size=(2,), tokenizer=tokenizer)
    env = env.append_transform(Declare(("ref", "full")))
    env = env.append_transform(
        RetrieveLogProb(reference, assistant_only=assistant_only)
    )
    data = step(env, make_policy(engine, tokenizer, pad_output=pad_output))
    expected = [
        score(ids) * (mask if assistant_only else 1.0)
        for ids, mask in template(data, tokenizer)
    ]
    check_rows(rows(data["next"], "ref", "full"), expected)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("assistant_only", [False, True])
@pytest.mark.parametrize("sglang_is", ["generation", "reference"])
def test_retrieve_kl(
    engine, tokenizer, score, new_model, pad_output, assistant_only, sglang_is
):
    """The engine on one side, a Hugging Face model that differs on the other."""
    models = [engine, new_model]
    if sglang_is == "reference":
        models.reverse()
    wrappers = [
        make_scorer(model, tokenizer, pad_output=pad_output, log_probs_key=key)
        for model, key in zip(models, ("gen", "ref"), strict=True)
    ]
    env = ChatEnv(batch_size=(2,), tokenizer=tokenizer)
    env = env.append_transform(Declare(("gen", "full"), ("ref", "full")))
    env = env.append_transform(
        RetrieveKL(
            *wrappers,
            assistant_only=assistant_only,
            add_to_reward=False,
            gen_log_probs_full_key=("gen", "full"),
            ref_log_probs_full_key=("ref", "full"),
        )
    )
    with torch.no_grad():
        data = step(env, make_policy(engine, tokenizer, pad_output=pad_output))
    other = functools.partial(score_with, new_model)
    sign = 1.0 if sglang_is == "generation" else -1.0
    expected = [
        sign * (score(ids) - other(ids)) * (mask if assistant_only else 1.0)
        for ids, mask in template(data, tokenizer)
    ]
    assert max(float(row.abs().max()) for row in expected) > 0.1
    check_rows(rows(data["next"], "kl_penalty"), expected)


def test_retrieve_kl_from_the_collector(engine, tokenizer, score, new_model):
    """The collector's policy becomes the scorer; a Hugging Face model the reference."""
    reference = make_scorer(new_model, tokenizer, log_probs_key="ref")
    env = make_env(tokenizer).append_transform(
        Declare(("gen", "full"), ("ref", "full"))
    )
    collector = LLMCollector(
        env,
        policy=make_policy(engine, tokenizer),
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
    )
    # The transform needs the collector, which asks its environment for specs before.
    collector.env.append_transform(
        RetrieveKL(
            "from_collector",
            reference,
            add_to_reward=False,
            gen_log_probs_full_key=("gen", "full"),
            ref_log_probs_full_key=("ref", "full"),
        )
    )
    with torch.no_grad():
        batches = [data.reshape(-1) for data in collector]
    for data in batches:
        expected = [
            (score(ids) - score_with(new_model, ids)) * mask
            for ids, mask in template(data, tokenizer)
        ]
        check_rows(rows(data["next"], "kl_penalty"), expected)
    collector.shutdown()


BIAS = {8: 8.0, 12: 8.0}
"""Of the policy: what it samples from is not what scoring returns, so KL is not 0."""


def expected_kl(data, model) -> list[torch.Tensor]:
    """KL of each row's response; zero for its prompt."""
    found = []
    for full, mask, answer in zip(
        rows(data, "tokens", "full"),
        rows(data, "masks", "all_attention_mask"),
        rows(data, "masks", "all_assistant_mask"),
        strict=True,
    ):
        kl = torch.zeros(len(full))
        ids = full[mask]
        kl[mask] = score_with(model, ids, BIAS) - score_with(model, ids)
        found.append(kl * answer)
    return found


def make_biased_policy(engine, tokenizer, prompt_logprobs, **kwargs) -> SGLangWrapper:
    """Returns a policy whose log-probs are those of what it samples from."""
    generate_kwargs = {
        "logit_bias": BIAS,
        "prompt_logprobs": prompt_logprobs,
        **kwargs.pop("generate_kwargs", {}),
    }
    return make_policy(
        engine,
        tokenizer,
        generate_kwargs=generate_kwargs,
        logprobs_mode="sampling",
        **kwargs,
    )


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_kl_computation(engine, tokenizer, hf_model, pad_output, prompt_logprobs):
    """The policy's own log-probs against the reference's; an unknown prompt adds 0."""
    policy = make_biased_policy(
        engine,
        tokenizer,
        prompt_logprobs,
        pad_output=pad_output,
        generate_kwargs=ENDINGS,
    )
    data = step(ChatEnv(batch_size=(2,), tokenizer=tokenizer), policy)
    reference = make_scorer(
        engine,
        tokenizer,
        input_mode="tokens",
        pad_output=pad_output,
        log_probs_key="ref",
    )
    data = RetrieveLogProb(reference, assistant_only=False)(data.exclude("next"))
    for row in data.unbind(0):
        row["reward"] = torch.ones(row["tokens", "full"].shape)[..., None]
    data = KLComputation(ref_log_probs_full_key=("ref", "full"), coeff=0.5)(data)
    expected = expected_kl(data, hf_model)
    assert max(float(row.abs().max()) for row in expected) > 0.1
    check_rows(rows(data, "kl_penalty"), expected)
    rewards = [1.0 - 0.5 * row for row in expected]
    check_rows([row[:, 0] for row in rows(data, "reward")], rewards)


# TorchRL reads the masks of an unpadded batch as one tensor, so its rows have to be
# of the same length; and assistant_only=False is an UnboundLocalError.
@pytest.mark.parametrize(
    ("pad_output", "queries"),
    [(False, ("hi 1", "yo 2")), (True, ("hi 2", "what is 2+2? 2"))],
)
@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_kl_reward(engine, tokenizer, hf_model, pad_output, queries, prompt_logprobs):
    reference = make_scorer(
        engine, tokenizer, input_mode="tokens", pad_output=pad_output
    )
    env = ChatEnv(batch_size=(2,), tokenizer=tokenizer).append_transform(NoReward())
    env = env.append_transform(KLRewardTransform(reference, coef=0.5))
    policy = make_biased_policy(
        engine,
        tokenizer,
        prompt_logprobs,
        pad_output=pad_output,
        generate_kwargs=ENDINGS if pad_output else {"ignore_eos": True},
    )
    data = step(env, policy, queries)
    expected = expected_kl(data, hf_model)
    kl = [row[:, 0] for row in rows(data["next"], "kl_penalty")]
    check_rows(kl, expected)
    rewards = [row[:, 0] for row in rows(data["next"], "reward")]
    check_rows(rewards, [-0.5 * row for row in expected])


# --- GRPO -----------------------------------------------------------------------


def make_batch(engine, tokenizer, *, pad_output, prompt_logprobs=False, **sampling):
    """Returns prompts of different lengths with responses of different lengths."""
    policy = make_policy(
        engine,
        tokenizer,
        pad_output=pad_output,
        generate_kwargs={
            **ENDINGS,
            "temperature": 0.0,
            "prompt_logprobs": prompt_logprobs,
            **sampling,
        },
    )
    env = ChatEnv(batch_size=(4,), tokenizer=tokenizer)
    data = step(env, policy, ("hi", "what is 2+2?", "zz", "qqqqq"))
    lengths = {int(row.sum()) for row in rows(data, "masks", "all_assistant_mask")}
    assert sampling or len(lengths) > 1
    return data


def make_loss(model, tokenizer, *, pad_output, **kwargs) -> GRPOLoss:
    actor = make_scorer(model, tokenizer, input_mode="tokens", pad_output=pad_output)
    return GRPOLoss(actor_network=actor, entropy_bonus=False, **kwargs)


def with_advantage(data, values):
    """Returns the data with one advantage for all tokens of a row."""
    length = max(map(len, rows(data, "tokens", "full")))
    advantage = torch.as_tensor(values)[:, None, None].expand(-1, length, 1)
    return data.copy().set("advantage", advantage.clone())


def padded_mask(data, name) -> torch.Tensor:
    return data.get(
        ("masks", name), as_padded_tensor=True, padding_side="left", padding_value=False
    )


@pytest.mark.parametrize("pad_output", [False, True])
def test_scores_stand_where_their_tokens_do(engine, tokenizer, hf_model, pad_output):
    """What is scored keeps its layout, padding included, as TorchRL's models do."""
    data = make_batch(engine, tokenizer, pad_output=pad_output, prompt_logprobs=True)
    kwargs = {"input_mode": "tokens", "pad_output": pad_output}
    scored = make_scorer(engine, tokenizer, **kwargs)(data.copy())
    with torch.no_grad():
        reference = make_scorer(hf_model, tokenizer, **kwargs)(data.copy())
    check_rows(rows(scored, "log_probs", "full"), rows(reference, "log_probs", "full"))
    check_rows(rows(scored, "log_probs", "full"), rows(data, "log_probs", "full"))
    for ids, before in zip(
        rows(scored, "tokens", "full"), rows(data, "tokens", "full"), strict=True
    ):
        assert ids.tolist() == before.tolist()


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_grpo_starts_at_ratio_one(
    engine, tokenizer, hf_model, pad_output, strategy, prompt_logprobs
):
    """With an advantage of one, the loss of each token is minus its ratio."""
    data = make_batch(
        engine, tokenizer, pad_output=pad_output, prompt_logprobs=prompt_logprobs
    )
    loss = make_loss(
        hf_model,
        tokenizer,
        pad_output=pad_output,
        masking_strategy=strategy,
        aggregation="none",
    )
    out = loss(with_advantage(data, [1.0] * 4))
    ratio = -out.loss_objective[..., 0]
    mask = padded_mask(data, "all_assistant_mask")
    if strategy == "generic" and prompt_logprobs:
        # Every token counts then. TorchRL's actor calls the first of a sequence
        # uniform and its own scores call it certain: its ratio means nothing.
        mask = padded_mask(data, "all_attention_mask")
        first = mask & (mask.cumsum(-1) == 1)
        ratio, mask = ratio * ~first, mask & ~first
    else:
        assert float(out.clip_fraction) == 0.0
        assert abs(float(out.kl_approx)) < TOLERANCE
        assert float(out.ESS) == pytest.approx(1.0, abs=TOLERANCE)
    torch.testing.assert_close(ratio, mask.float(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"temperature": 0.7, "logit_bias": {9: 8.0}, "min_tokens": 4},
    ],
    ids=", ".join,
)
def test_grpo_starts_at_ratio_one_however_it_samples(
    engine, tokenizer, hf_model, sampling
):
    data = make_batch(engine, tokenizer, pad_output=True, **sampling)
    loss = make_loss(
        hf_model,
        tokenizer,
        pad_output=True,
        masking_strategy="rlhf",
        aggregation="none",
    )
    out = loss(with_advantage(data, [1.0] * 4))
    mask = padded_mask(data, "all_assistant_mask")
    ratio = -out.loss_objective[..., 0]
    torch.testing.assert_close(ratio, mask.float(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pad_output", [False, True])
def test_grpo_with_a_reference(engine, tokenizer, hf_model, new_model, pad_output):
    """The engine's scores are the reference that the loss keeps a new model near."""
    data = make_batch(engine, tokenizer, pad_output=pad_output)
    reference = make_scorer(
        engine,
        tokenizer,
        input_mode="tokens",
        pad_output=pad_output,
        log_probs_key="ref_log_probs",
    )
    data = RetrieveLogProb(reference, assistant_only=False)(data)
    loss = make_loss(
        new_model,
        tokenizer,
        pad_output=pad_output,
        masking_strategy="rlhf",
        kl_to_ref_coeff=1.0,
    )
    out = loss(with_advantage(data, [1.0] * 4))
    answers = rows(data, "masks", "all_assistant_mask")
    total, count = 0.0, 0
    for full, mask, answer in zip(
        rows(data, "tokens", "full"),
        rows(data, "masks", "all_attention_mask"),
        answers,
        strict=True,
    ):
        chosen = answer[mask]
        ids = full[mask]
        diff = (score_with(hf_model, ids) - score_with(new_model, ids))[chosen]
        total += float((diff.expm1() - diff).sum())
        count += max(map(len, answers))
    # TorchRL's mean is over the padding too.
    assert float(out.kl_to_ref) == pytest.approx(total / count, rel=1e-3)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_grpo_gradient(engine, tokenizer, hf_model, pad_output, strategy):
    """The gradient equals the one of the advantage-weighted response log-probs."""
    data = make_batch(engine, tokenizer, pad_output=pad_output)
    advantages = [1.0, -2.0, 0.5, 3.0]
    loss = make_loss(
        hf_model, tokenizer, pad_output=pad_output, masking_strategy=strategy
    )
    loss(with_advantage(data, advantages)).loss_objective.backward()
    gradients = [parameter.grad for parameter in hf_model.parameters()]
    expected = torch.autograd.grad(
        policy_gradient_loss(data, advantages, hf_model), list(hf_model.parameters())
    )
    for gradient, reference in zip(gradients, expected, strict=True):
        scale = float(reference.abs().max())
        torch.testing.assert_close(
            gradient, reference, atol=TOLERANCE * max(scale, 1.0), rtol=0
        )


def policy_gradient_loss(data, advantages, model) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for full, mask, answer, advantage in zip(
        rows(data, "tokens", "full"),
        rows(data, "masks", "all_attention_mask"),
        rows(data, "masks", "all_assistant_mask"),
        advantages,
        strict=True,
    ):
        ids, chosen = full[mask], answer[mask][1:]
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        picked = log_probs.gather(-1, ids[1:, None])[:, 0][chosen]
        total = total - advantage * picked.sum()
        count += len(picked)
    return total / count


def test_grpo_loop(engine, tokenizer, hf_model, score):
    """Groups of dialogs, their advantages from the buffer, and the first loss."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(32),
        transform=MCAdvantage(grpo_size=2, prompt_key="query"),
        batch_size=4,
    )
    collector = LLMCollector(
        make_env(tokenizer, ("a 1", "bb 1"), repeats=2),
        policy=make_policy(engine, tokenizer),
        yield_completed_trajectories=True,
        total_dialog_turns=16,
        replay_buffer=buffer,
    )
    assert all(data is None for data in collector)
    data = buffer.sample()
    check_dialogs(data, tokenizer, score)
    for group in buffer[:]["advantage"].split(2):
        assert abs(float(group.sum())) < TOLERANCE
    loss = make_loss(hf_model, tokenizer, pad_output=False, masking_strategy="rlhf")
    out = loss(data)
    assert float(out.ESS) == pytest.approx(1.0, abs=TOLERANCE)
    assert float(out.clip_fraction) == 0.0
    collector.shutdown()

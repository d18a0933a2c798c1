"""AsyncLLMCollector on a real server, with real weight updates."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from helpers import killed_runs
from helpers.collecting import begin, length_reward, talk, tasks
from helpers.forked_starts import trainer_python
from helpers.log_probs import TOLERANCE, score
from helpers.waiting import wait_until
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    attach_weight_sync,
)
from torchrl_sglang.errors import CollectionError
from torchrl_sglang.testing.tiny_model import make_tiny_model

BATCHES = 3
SIZE = 4


@pytest.fixture
def models(hf_model, tokenizer):
    return [hf_model, make_tiny_model(tokenizer, seed=11)]


@pytest.fixture
def scheme(restored_engine):
    scheme = SGLangWeightSyncScheme(restored_engine)
    yield scheme
    scheme.shutdown()


def collect(collector, models) -> list[TensorDict]:
    """Takes batches, with an update after each."""
    batches = []
    for batch, model in zip(collector, itertools.cycle(models), strict=False):
        batches.append(batch.reshape(-1))
        if len(batches) == BATCHES:
            return batches
        collector.update_policy_weights_(model)
    raise AssertionError


def test_weights_that_have_diverged_end_it(restored_engine, hf_model, scheme):
    """Their logits are NaN, which no further attempt changes."""
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.fill_(1e30)
    policy = SGLangWrapper(restored_engine, generate_kwargs={"max_new_tokens": 4})
    sender = scheme.create_sender()
    sender.update_weights(hf_model)
    with (
        AsyncLLMCollector(
            policy=policy,
            prompts=tasks(100),
            rewards=length_reward,
            groups_per_batch=4,
        ) as collector,
        pytest.raises(CollectionError, match="8 groups in a row .*not numbers"),
    ):
        next(iter(collector))
    assert collector.stats()["groups_failed"] == 8


def test_without_staleness_it_is_synchronous(
    restored_engine, models, scheme, tokenizer
):
    policy = SGLangWrapper(
        restored_engine, generate_kwargs={"max_new_tokens": 12, "temperature": 0.0}
    )
    given = tasks(SIZE * (BATCHES + 2))
    rows = [given[start : start + SIZE] for start in range(0, len(given), SIZE)]
    loader = [{name: [row[name] for row in part] for name in part[0]} for part in rows]
    env = ChatEnv.from_dataloader(loader, tokenizer=tokenizer, batch_size=(SIZE,))
    env.append_transform(StepCounter(max_steps=1))
    synchronous = LLMCollector(env, policy=policy, dialog_turns_per_batch=SIZE)
    attach_weight_sync(synchronous, scheme)
    expected = collect(synchronous, reversed(models))
    synchronous.shutdown()
    # The environment's construction resets it, which reads a batch.
    prompts = [{"query": query} for batch in expected for query in batch["query"]]

    scheme.create_sender().update_weights(models[0])
    with AsyncLLMCollector(
        policy=policy,
        prompts=prompts,
        groups_per_batch=SIZE,
        max_staleness=0,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        found = collect(collector, reversed(models))
        assert collector.stats()["age"] == {
            0: sum(len(row) for batch in found for row in responses(batch))
        }
    for ours, theirs in zip(found, expected, strict=True):
        for key in (("tokens", "full"), ("masks", "all_assistant_mask")):
            pairs = zip(
                ours.get(key, as_list=True), theirs.get(key, as_list=True), strict=True
            )
            assert all(torch.equal(*pair) for pair in pairs)
        assert ours["query"] == theirs["query"]
        for one, other in zip(
            ours.get(("log_probs", "response"), as_list=True),
            theirs.get(("log_probs", "response"), as_list=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0.0)


def responses(batch) -> list[torch.Tensor]:
    return batch.get(("tokens", "response"), as_list=True)


def test_agents_through_weight_updates(restored_engine, models, scheme):
    """Each token's log-prob is that of the version that the row says, to the bound."""

    async def agent(task, *, base_url, api_key):
        options = {"max_tokens": 12, "ignore_eos": True}
        await talk(base_url, api_key, task["query"], turns=3, **options)
        return float(len(task["query"]))

    first = int(scheme.create_sender().update_weights(models[0]).version)
    with (
        Gateway(restored_engine) as gateway,
        AsyncLLMCollector(
            policy=SGLangWrapper(restored_engine),
            prompts=tasks(100),
            agent=agent,
            gateway=gateway,
            group_size=2,
            groups_per_batch=2,
            max_staleness=1,
            weight_sync_schemes={"policy": scheme},
        ) as collector,
    ):
        batches = collect(collector, reversed(models))
        assert collector.stats()["age"].keys() <= {0, 1}
    order = [models[0], models[1], models[0]]
    seen = set()
    for row in itertools.chain(*batches):
        ids, mask = row["tokens"].full, row["masks"].all_assistant_mask
        assert mask.sum() == 36
        length = len(row["tokens"].prompt)
        versions = row["generation_info"].weight_version
        known = row["log_probs"].full
        for version in versions[versions >= 0].unique().tolist():
            of_version = mask.clone()
            of_version[length:] &= versions == version
            expected = score(order[version - first], ids)[of_version]
            torch.testing.assert_close(
                known[of_version], expected, atol=TOLERANCE, rtol=0.0
            )
            seen.add(version)
    assert len(seen) > 1


def test_no_token_is_older_than_the_bound(restored_engine, models, scheme):
    """By the versions that the server reported, and by the log-probs themselves."""
    policy = SGLangWrapper(
        restored_engine,
        generate_kwargs={"max_new_tokens": 24, "ignore_eos": True},
        return_generation_info=True,
    )
    collector = AsyncLLMCollector(
        policy=policy,
        prompts=tasks(50),
        rewards=length_reward,
        group_size=2,
        groups_per_batch=2,
        max_staleness=2,
        weight_sync_schemes={"policy": scheme},
    )
    first = restored_engine.weight_version
    counts = {int(first) if first.isdigit() else -1: 0}
    ages = set()
    for batch in itertools.islice(collector, 8):
        version = collector.policy_version
        told = batch.get(("generation_info", "weight_version"), as_list=True)
        full = batch.get(("tokens", "full"), as_list=True)
        log_probs = batch.get(("log_probs", "response"), as_list=True)
        for served, tokens, values, oldest in zip(
            told, full, log_probs, batch["policy_version"].tolist(), strict=True
        ):
            known = [counts[each] for each in served.tolist()]
            assert version - min(known) <= 2
            assert oldest == min(known)
            ages.add(version - oldest)
            for number in set(known):
                own = torch.tensor(known) == number
                reference = score(models[number % 2], tokens)[-len(values) :]
                assert float((values - reference)[own].abs().max()) < TOLERANCE
        report = collector.update_policy_weights_(models[(version + 1) % 2])
        counts[int(report.version)] = collector.policy_version
    assert ages == {0, 1, 2}
    assert collector.stats()["groups_stale"] == 0
    collector.shutdown()


def test_a_tool_between_two_turns(engine, tokenizer):
    """The second prompt continues the very tokens of the first response."""
    policy = SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 6}, prefer_tokens=True
    )

    class Call:
        tool = "clock"
        args: dict[str, str] = {}  # noqa: RUF012

    def parse(response):
        return {"calls": [Call]}

    with AsyncLLMCollector(
        policy=policy,
        prompts=tasks(2),
        tools={"clock": (lambda: "12:00", {"description": "Tells the time."})},
        tool_parser=parse,
        max_turns=2,
        groups_per_batch=2,
    ) as collector:
        batch = next(iter(collector))
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2
    for turn in (0, 2):
        first, second = batch[turn], batch[turn + 1]
        begun = first["tokens"].full
        assert torch.equal(second["tokens"].prompt[: len(begun)], begun)
        rest = tokenizer.decode(second["tokens"].prompt[len(begun) :])
        assert "12:00" in rest
        reference = score(policy_model(engine), second["tokens"].full)
        response = second["log_probs"].response
        assert float((reference[-len(response) :] - response).abs().max()) < TOLERANCE


def policy_model(engine) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        engine.model_path, dtype=torch.float32
    ).eval()


@pytest.mark.slow
def test_runs_that_are_killed(engine, tmp_path):
    """Every prompt is trained on once in each epoch, whenever the program is killed."""
    program = killed_runs.__file__
    done = subprocess.run(
        [trainer_python(), program, engine.server_url, tmp_path, engine.model_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    # Warnings come before it.
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == killed_runs.RUNS.keys()
    times = killed_runs.EPOCHS * killed_runs.GROUP_SIZE
    for run in found.values():
        assert run["kills"] > 0
        assert sorted(run["trained"]) == sorted([*range(killed_runs.PROMPTS)] * times)


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle(tiny_model_path):
    """What it was generating goes on when it is there again."""
    with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        policy = SGLangWrapper(
            engine, generate_kwargs={"max_new_tokens": 150, "ignore_eos": True}
        )
        with AsyncLLMCollector(
            policy=policy,
            prompts=tasks(6),
            group_size=2,
            groups_per_batch=2,
            total_groups=6,
        ) as collector:
            begin(collector)
            wait_until(lambda: collector.stats()["conversations_in_flight"])
            os.kill(engine.servers[0].pid, signal.SIGKILL)
            answers = [int(row["answer"]) for batch in collector for row in batch]
            assert sorted(answers) == [n for n in range(6) for _ in range(2)]
            assert collector.stats()["groups_failed"] == 0
        assert engine.stats().restarts > 0

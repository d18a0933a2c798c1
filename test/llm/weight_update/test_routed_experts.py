"""The experts of each token are those of the weights that computed it."""

from __future__ import annotations

import copy
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers.branches import ask_twice
from helpers.routing import chosen
from helpers.tiny_models import save_tiny_moe
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.requests.token_columns import check_columns, find_columns
from torchrl_sglang.support.event_loop import run_sync

LAYERS, CHOSEN = 3, 2
COLUMNS = ["routed_experts"]
PARAMS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    return save_tiny_moe(path, num_layers=LAYERS, num_experts=8)


@pytest.fixture(scope="module")
def moe_engine(moe_path):
    with AsyncSGLang.from_pretrained(
        str(moe_path), device="cpu", enable_return_routed_experts=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def moe(moe_path):
    return AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32).eval()


def check(found, wanted):
    """Holds rows to those of a model, but for the last token's."""
    found = torch.as_tensor(found).long().sort(-1).values
    assert found.shape == wanted.shape
    assert found[-1].eq(-1).all()
    assert (found[:-1] != wanted[:-1]).sum() == 0


def check_batch(batch, model):
    for row in batch.reshape(-1).unbind(0):
        full = row["routed_experts", "full"]
        assert full.dtype == torch.int8
        mask = row["masks", "all_attention_mask"]
        assert full[~mask].eq(-1).all()
        check(full[mask], chosen(model, row["tokens", "full"][mask]))


def test_experts_of_prompt_and_response(moe_engine, moe):
    """Several samples, ragged and padded; a prompt that is cached has them, too."""
    prompts = [[5, 6, 7], [9] * 20]
    td = lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(prompt))) for prompt in prompts]
    )
    policy = SGLangWrapper(
        moe_engine,
        input_mode="tokens",
        generate_kwargs=PARAMS,
        token_columns=COLUMNS,
        num_samples=2,
    )
    for padded in (False, True):
        batch = policy.get_new_version(pad_output=padded)(td.copy())
        assert batch.shape == (2, 2)
        check_batch(batch, moe)


def test_conversations_and_branches(moe_engine, moe):
    """Each turn has those of its prompt; a branch shares those of its first turn."""
    policy = SGLangWrapper(moe_engine, generate_kwargs=PARAMS, token_columns=COLUMNS)
    with AsyncLLMCollector(
        policy=policy,
        prompts=[{"query": "Hi"}],
        rewards=lambda conversation, task: 1.0,
        step=lambda conversation, task: (
            "go on" if len(conversation.turns) == 1 else None
        ),
        group_size=2,
        groups_per_batch=1,
    ) as collector:
        batch = next(iter(collector))
    assert len(batch) == 4
    check_batch(batch, moe)
    with Gateway(moe_engine, token_columns=COLUMNS) as gateway:
        ask_twice(gateway.session("a"), max_tokens=6)
        branches = gateway.to_tensordict()
    assert branches.shape == (2,)
    for row in branches:
        found = row["routed_experts", "full"].long().sort(-1).values
        wanted = chosen(moe, row["tokens", "full"])
        known = found.ge(0).all(-1).all(-1)
        # The last token of each of the two turns has none.
        assert (~known).sum() <= 2
        assert torch.equal(found[known], wanted[known])


def test_updates_and_an_abort(moe_engine, moe):
    """Old tokens keep their rows; the last one's is of the new weights."""
    prompt = [5, 6, 7, 8] * 8
    models = [moe, copy.deepcopy(moe)]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    sender = SGLangWeightSyncScheme(moe_engine).create_sender()
    known = {sender.update_weights(models[0]).version: models[0]}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            moe_engine.generate,
            input_ids=[prompt] * 4,
            sampling_params={**PARAMS, "max_new_tokens": 150},
            token_columns=COLUMNS,
            timeout=120,
        )
        while run_sync(moe_engine.control.running_requests()) < 4:
            assert not running.done()
        known[sender.update_weights(models[1]).version] = models[1]
        completions = running.result(120)
        aborted = pool.submit(
            moe_engine.generate,
            input_ids=prompt,
            sampling_params={**PARAMS, "max_new_tokens": 1500},
            token_columns=COLUMNS,
            request_ids=["mine"],
            return_partial=True,
        )
        while not run_sync(moe_engine.control.running_requests()):
            assert not aborted.done()
        moe_engine.abort(["mine"])
        (part,) = aborted.result(60)
    sender.update_weights(models[0])
    sender.shutdown()
    seen = set()
    for completion in completions:
        tokens = [*prompt, *completion.token_ids]
        wanted = torch.empty(len(tokens), LAYERS, CHOSEN, dtype=torch.long)
        for span in completion.versions:
            seen.add(span.version)
            # A token is computed by the weights that the next one is sampled from.
            start = len(prompt) + span.start - 1 if span.start else 0
            wanted[start:] = chosen(known[span.version], tokens)[start:]
        check(rows_of(completion), wanted)
    assert seen == known.keys()
    assert part.finish_reason == "abort"
    assert len(part.token_ids) < 1500
    if part.token_ids:
        check(rows_of(part), chosen(models[1], [*prompt, *part.token_ids]))


def rows_of(completion):
    both = completion.prompt_columns, completion.columns
    return torch.cat([torch.from_numpy(each["routed_experts"].values) for each in both])


@pytest.mark.slow
def test_a_killed_server_behind_a_router(moe_path, moe):
    """What is generated again on the other one has its rows; the router drops none."""
    with (
        AsyncSGLang.from_pretrained(
            str(moe_path),
            device="cpu",
            num_replicas=2,
            enable_return_routed_experts=True,
        ) as engine,
        ThreadPoolExecutor() as pool,
    ):
        assert engine.server_url not in engine.control.urls
        prompts = [[5 + number, 6, 7, 8] for number in range(16)]
        running = pool.submit(
            engine.generate,
            input_ids=prompts,
            sampling_params={**PARAMS, "max_new_tokens": 300},
            token_columns=COLUMNS,
            timeout=200,
        )
        while not all(
            map(any, run_sync(engine.control.loads(urls=engine.control.urls)))
        ):
            assert not running.done()
        os.kill(engine.servers[1].pid, signal.SIGKILL)
        completions = running.result(200)
        assert engine.stats().retries > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.token_ids]
        assert len(completion.token_ids) == 300
        check(rows_of(completion), chosen(moe, tokens))


def test_servers_without_it(engine, moe_engine):
    """What they lack is named, with the remedy."""
    with pytest.raises(UnsupportedByServerError, match="no mixture of experts"):
        engine.generate(input_ids=[5], token_columns=COLUMNS)
    limits = moe_engine.capabilities
    without = replace(limits, server_args={"enable_return_routed_experts": False})
    (column,) = find_columns(COLUMNS)
    with pytest.raises(UnsupportedByServerError, match="enable_return_routed_experts="):
        check_columns([column], {}, without)
    for count, dtype in ((128, "int8"), (129, "int16"), (None, "int16")):
        experts = replace(limits.experts, num_experts=count)
        assert column.layout(replace(limits, experts=experts)).dtype == dtype

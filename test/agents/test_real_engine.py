"""Unmodified clients on a real engine: log-probs are those of the tokens' weights.

What the model writes is random; Hugging Face's model of each version is the oracle.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
import torch
from helpers.agent_clients import CLIENTS, HELLO, REWARD, ROOT, job_of
from helpers.log_probs import TOLERANCE, score
from helpers.scripted_server import make_scripted_tokenizer
from helpers.tool_template import gateway_of

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.gateway.adapters.verifiers_agent import VerifiersAgent
from torchrl_sglang.support import event_loop
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

CONTEXT = 65_536
SHAPE = {"num_layers": 1, "max_position_embeddings": CONTEXT, "initializer_range": 0.2}
WORD = "[a-z]{4}"
CALL = (
    r"<think>[a-f]{4}</think>I look\.<tool_call>\n"
    r'\{"name": "@tool", "arguments": \{"@key": "echo @word >>calls"@more\}\}'
    r"\n</tool_call>"
).replace("@word", WORD)
SAID = f"It is {WORD}\\."
ANY = ".*"

SESSIONS, UPDATES, TURNS, TOKENS = 64, 5, 4, 24
FRAMEWORKS = ("openai-agents", "pydantic-ai", "langchain-openai")
SECONDS = 900.0


class ForcingProxy(FaultyProxy):
    """Says what the model writes in each turn, in the place of any other grammar."""

    def __init__(self, target, regexes):
        super().__init__(target)
        self._regexes = iter(regexes)

    async def _forward(self, request, body):
        if request.path == "/generate":
            sent = msgspec.json.decode(body)
            if sent["sampling_params"].get("regex"):
                sent["sampling_params"]["regex"] = next(self._regexes)
                body = msgspec.json.encode(sent)
        return await super()._forward(request, body)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that reads long prompts, its tokenizer, and its folder."""
    folder = tmp_path_factory.mktemp("real")
    pages = [*ROOT.glob("docs/source/**/*.rst"), *CLIENTS.glob("*.py")]
    tokenizer = make_scripted_tokenizer([path.read_text() for path in sorted(pages)])
    tokenizer.save_pretrained(folder)
    model = make_tiny_model(tokenizer, **SHAPE)
    model.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture(scope="module")
def engine(model):
    with AsyncSGLang.from_pretrained(
        str(model[2]), device="cpu", grammar_backend="xgrammar"
    ) as engine:
        yield engine


def compare(rows, models):
    """Compares log-probs with those of each token's version; returns how many."""
    compared = 0
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        found = row["log_probs", "full"]
        assert torch.equal(found.isfinite(), mask)
        versions = torch.full((len(ids),), -2)
        versions[len(row["tokens", "prompt"]) :] = row[
            "generation_info", "weight_version"
        ]
        for version in set(versions[mask].tolist()):
            place = mask & (versions == version)
            expected = score(models[version], ids)[place]
            torch.testing.assert_close(found[place], expected, atol=TOLERANCE, rtol=0)
            compared += int(place.sum())
    return compared


@pytest.mark.parametrize(
    ("name", "tool", "key", "more"),
    [
        # Its 47,000 tokens of instructions and tools are all read.
        ("claude-code", "Bash", "command", ', "description": "Look"'),
        ("codex", "exec_command", "cmd", ""),
    ],
)
def test_a_coding_agent(running_of, engine, model, tmp_path, name, tool, key, more):
    """Two commands of the model's, and an answer, in one conversation."""
    call = CALL.replace("@tool", tool).replace("@key", key).replace("@more", more)
    with (
        ForcingProxy(engine.server_url, [call, call, SAID]) as proxy,
        AsyncSGLang.connect(proxy.url) as forced,
        gateway_of(forced, forced_sampling_params={"regex": ANY}) as gateway,
    ):
        session = gateway.session()
        client = running_of(name)
        job = {"folder": str(tmp_path), "timeout": 300.0}
        report = client.run(job_of(session, [HELLO], **job), timeout=SECONDS)
        assert report["error"] is None, report
        gateway.set_reward(session, REWARD)
        rows = gateway.to_tensordict([session])
    assert len(rows) == 1
    assert report["answer"] == session.turns[-1].text
    calls = [turn.reply["tool_calls"] for turn in session.turns[:2]]
    commands = [one["function"]["arguments"][key] for (one,) in calls]
    assert report["called"] == [command.split()[1] for command in commands]
    assert compare(rows, {-1: model[0]}) == session.num_tokens
    assert rows["next", "done"].all()


def test_three_frameworks_at_once_through_weight_updates(
    running_of, engine, model, tmp_path
):
    first, tokenizer, _ = model
    models, seeds = {}, itertools.count(1)
    noise = {"max_new_tokens": TOKENS, "ignore_eos": True}
    with ExitStack() as stack:
        clients = [running_of(name) for name in FRAMEWORKS]
        scheme = SGLangWeightSyncScheme(engine)
        stack.callback(scheme.shutdown)
        sender = scheme.create_sender()

        def update(model):
            models[int(sender.update_weights(model).version)] = model

        update(first)
        stack.callback(update, first)
        gateway = stack.enter_context(gateway_of(engine, default_sampling_params=noise))
        sessions = [[gateway.session() for _ in range(SESSIONS)] for _ in FRAMEWORKS]
        everything = list(itertools.chain(*sessions))
        job = {"folder": str(tmp_path), "timeout": 300.0}
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        running = [
            pool.submit(
                client.run,
                [job_of(session, [HELLO] * TURNS, **job) for session in own],
                timeout=SECONDS,
            )
            for client, own in zip(clients, sessions, strict=True)
        ]
        for number in range(1, UPDATES + 1):
            wait_for_turns(everything, running, number / (UPDATES + 1))
            update(make_tiny_model(tokenizer, seed=next(seeds), **SHAPE))
        reports = [future.result() for future in running]
        for session in everything:
            gateway.set_reward(session, REWARD)
        rows = gateway.to_tensordict(everything)
    for report in itertools.chain(*reports):
        assert report["error"] is None, report
    assert [len(session.turns) for session in everything] == [TURNS] * len(everything)
    assert len(rows) == len(everything)
    generated = len(everything) * TURNS * TOKENS
    assert compare(rows, models) == generated
    versions = {
        span.version
        for session in everything
        for turn in session.turns
        for span in turn.completion.versions
    }
    assert len(versions) == UPDATES + 1


def test_episodes_of_verifiers_at_once_through_weight_updates(
    verifiers_python, engine, model
):
    first, tokenizer, _ = model
    models, seeds = {}, itertools.count(1)
    noise = {"max_new_tokens": TOKENS, "ignore_eos": True}
    with ExitStack() as stack:
        agent = stack.enter_context(
            VerifiersAgent(
                "weather_taskset",
                python=verifiers_python,
                harness={"id": "talking_harness", "turns": TURNS},
                environment={"PYTHONPATH": str(CLIENTS)},
            )
        )
        task = agent.prompts()[0]
        scheme = SGLangWeightSyncScheme(engine)
        stack.callback(scheme.shutdown)
        sender = scheme.create_sender()

        def update(model):
            models[int(sender.update_weights(model).version)] = model

        update(first)
        stack.callback(update, first)
        gateway = stack.enter_context(gateway_of(engine, default_sampling_params=noise))
        sessions = [gateway.session() for _ in range(SESSIONS)]
        running = [
            event_loop.submit(
                agent(task, base_url=session.base_url, api_key=session.key)
            )
            for session in sessions
        ]
        for number in range(1, UPDATES + 1):
            wait_for_turns(sessions, running, number / (UPDATES + 1))
            update(make_tiny_model(tokenizer, seed=next(seeds), **SHAPE))
        for session, future in zip(sessions, running, strict=True):
            gateway.set_reward(session, future.result(SECONDS).reward)
        rows = gateway.to_tensordict(sessions)
    assert [len(session.turns) for session in sessions] == [TURNS] * SESSIONS
    assert len(rows) == SESSIONS
    assert compare(rows, models) == SESSIONS * TURNS * TOKENS
    versions = {
        span.version
        for session in sessions
        for turn in session.turns
        for span in turn.completion.versions
    }
    assert len(versions) == UPDATES + 1


def wait_for_turns(sessions, running, part):
    """Waits until that part of all turns is there, or a client has failed."""
    wanted, end = part * TURNS * len(sessions), time.monotonic() + SECONDS
    while sum(len(session.turns) for session in sessions) < wanted:
        for future in running:
            if future.done():
                future.result()
        assert time.monotonic() < end
        time.sleep(0.05)

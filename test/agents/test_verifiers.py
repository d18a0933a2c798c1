"""Environments of `verifiers` 0.4 through ``VerifiersAgent``, from their own Python."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.agent_clients import CLIENTS, ROME, check_rows
from helpers.scripted_server import Reply, ScriptedServer
from helpers.tool_template import TOOL_TEMPLATE
from helpers.waiting import wait_until_gone

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.errors import ConfigurationError, UserFunctionError
from torchrl_sglang.gateway.adapters.verifiers_agent import (
    MAX_ANSWER_BYTES,
    VerifiersAgent,
)
from torchrl_sglang.support import event_loop

LOOK = Reply(reasoning="They want to know.", text="I look.", calls=[ROME])
RIGHT, WRONG = Reply(text="It is 21 degrees."), Reply(text="It is 9 degrees.")
SECONDS = 300.0


@pytest.fixture
def make_agent(verifiers_python) -> Iterator[Any]:
    agents = []

    def make(taskset="weather_taskset", *, variables=(), **arguments):
        environment = {"PYTHONPATH": str(CLIENTS), **dict(variables)}
        harness = {"id": "talking_harness", "turns": 1}
        arguments = {"harness": harness, "python": verifiers_python, **arguments}
        agents.append(VerifiersAgent(taskset, environment=environment, **arguments))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def serve(model_folder, model_tokenizer) -> Any:
    @contextmanager
    def serve(script) -> Iterator[tuple[ScriptedServer, Gateway]]:
        with (
            ScriptedServer(model_folder, model_tokenizer, script) as server,
            AsyncSGLang.connect(server.url) as engine,
            Gateway(
                engine,
                chat_template=TOOL_TEMPLATE,
                tool_call_parser="qwen25",
                reasoning_parser="qwen3",
            ) as gateway,
        ):
            yield server, gateway

    return serve


def run(gateway, agent, *, number=0, group_size=1):
    (sessions,) = asyncio.run(
        gateway.run_agents(
            agent, agent.prompts()[number : number + 1], group_size=group_size
        )
    )
    return sessions


@pytest.mark.parametrize(("last", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_tools_of_a_server_and_a_reward(make_agent, serve, last, reward):
    with serve([LOOK, last]) as (server, gateway):
        agent = make_agent(harness="null", variables={"WITH_TOOLS": "1"})
        (session,) = run(gateway, agent)
        assert session.reward == reward
        rows = gateway.to_tensordict([session])
        check_rows(rows, server.generated, reward)
        answer = session.turns[-1].prompt.messages[-1]
        assert (answer["role"], answer["content"]) == (
            "tool",
            "It is 21 degrees in Rome.",
        )


def test_each_episode_has_its_own_session_and_the_process_is_shared(make_agent, serve):
    with serve([RIGHT] * 16) as (server, gateway):
        agent = make_agent()
        sessions = run(gateway, agent, group_size=16)
        assert [session.reward for session in sessions] == [1.0] * 16
        assert [len(session.turns) for session in sessions] == [1] * 16
        assert server.script == []


def test_traces_of_one_episode_have_their_own_rewards(make_agent, serve):
    """Of a rubric that compares the attempts at a task with each other."""
    with serve([RIGHT, WRONG, RIGHT]) as (_, gateway):
        agent = make_agent(env={"id": "best-of-n", "n": 3})
        (session,) = run(gateway, agent)
        assert session.metrics["reward/right"] == session.metrics["best"] == 2 / 3
        assert session.metrics["pass_at_n"] == 1.0
        assert session.reward is None
        assert set(session.agent_rewards) == {"agent", "agent-2", "agent-3"}
        by_agent = {turn.model: turn.text for turn in session.turns}
        assert session.agent_rewards == {
            name: float("21" in text) for name, text in by_agent.items()
        }
        rewards = gateway.to_tensordict([session])["next", "reward"]
        assert sorted(rewards.flatten().tolist()) == [0.0, 1.0, 1.0]


def reward(task, episode):
    (trace,) = episode["traces"]
    assert trace["rewards"] == {"right": 1.0}
    # On the event loop of the episodes, nothing else would run meanwhile.
    assert threading.current_thread().name == "torchrl_sglang-rewards"
    return trace["metrics"]["letters"] + task["task"]


async def awaited_reward(task, episode):
    (trace,) = episode["traces"]
    return trace["metrics"]["letters"] + task["task"]


@pytest.mark.parametrize("reward", [reward, awaited_reward])
def test_a_reward_function_reads_rewards_and_metrics(make_agent, serve, reward):
    with serve([RIGHT]) as (_, gateway):
        (session,) = run(gateway, make_agent(reward=reward))
        assert session.reward == len(RIGHT.text)
        letters = float(len(RIGHT.text))
        assert session.metrics == {"reward/right": 1.0, "letters": letters}
        metrics = gateway.to_tensordict([session])["next", "metrics"]
        assert metrics["reward/right"].item() == 1.0


def test_a_metric_may_have_the_name_of_a_reward(make_agent, serve):
    with serve([RIGHT]) as (_, gateway):
        (session,) = run(gateway, make_agent(variables={"METRIC": "right"}))
        assert session.metrics["reward/right"] == 1.0
        assert session.metrics["right"] == 0.25


def test_names_of_metrics_depend_on_no_other_trace(make_agent, serve):
    with serve([RIGHT, RIGHT, WRONG]) as (_, gateway):
        agent = make_agent(env={"id": "judged_env"})
        (both,) = run(gateway, agent)
        (alone,) = run(gateway, agent, number=1)
        of_solver = {"solver/letters", "solver/reward/right"}
        assert set(alone.metrics) == of_solver
        assert set(both.metrics) == {*of_solver, "judge/letters", "judge/reward/right"}


def test_a_reward_that_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="reward must be a function"):
        VerifiersAgent("weather_taskset", python=sys.executable, reward="right")


RETRIES = {"retries": {"max_retries": 1}}


@pytest.mark.parametrize("env", [RETRIES, {"agent": RETRIES}], ids=["episode", "agent"])
def test_an_attempt_that_verifiers_repeats_is_not_trained(make_agent, serve, env):
    harness = {"id": "talking_harness", "turns": 2}
    with serve([WRONG, Reply(text="raise"), WRONG, RIGHT]) as (_, gateway):
        (session,) = run(gateway, make_agent(env=env, harness=harness))
        assert [turn.text for turn in session.turns][-1] == RIGHT.text
        assert len(session.turns) == 2
        (trajectory,) = session.trajectories()
        assert trajectory.reward == 1.0


def test_a_call_that_outlasts_its_attempt_is_aborted(make_agent, serve):
    """Its turn would come after the reward."""
    with serve([RIGHT, Reply(hangs=True)]) as (server, gateway):
        harness = {"id": "talking_harness", "turns": 2}
        agent = make_agent(
            env={"agent": {"timeout": {"rollout": 10.0}}}, harness=harness
        )
        (session,) = run(gateway, agent)
        server.wait_for("/abort_request", timeout=60.0)
        assert session.reward == 1.0
        assert len(session.turns) == 1


def test_a_repeated_attempt_of_several_is_not_trained(make_agent, serve):
    with serve([RIGHT, Reply(text="raise"), WRONG]) as (_, gateway):
        agent = make_agent(env={"id": "best-of-n", "n": 2, "agent": RETRIES})
        (session,) = run(gateway, agent)
        assert session.agent_rewards == {"agent": 1.0, "agent-3": 0.0}
        assert {turn.model for turn in session.turns} == {"agent", "agent-3"}


def test_an_endless_line_of_errors_is_cut(tmp_path):
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\nhead -c 4000000 /dev/zero | tr '\\0' x >&2\nexit 3\n"
    )
    program.chmod(0o755)
    with (
        VerifiersAgent("weather_taskset", python=program) as agent,
        pytest.raises(ConfigurationError, match="ended with status 3") as failure,
    ):
        agent.prompts()
    assert len(str(failure.value)) < 2**18


def test_a_failed_episode_is_an_error_with_its_reason(make_agent, serve):
    with serve([Reply(text="raise"), RIGHT]) as (_, gateway):
        agent = make_agent()
        with pytest.raises(UserFunctionError, match="a reward that fails"):
            run_alone(gateway, agent)
        assert [session.reward for session in run(gateway, agent)] == [1.0]


def test_an_answer_that_is_too_long_fails_its_episode(make_agent, serve):
    words = str(MAX_ANSWER_BYTES // len("a reward that fails") + 1)
    with serve([Reply(text="raise"), RIGHT]) as (_, gateway):
        agent = make_agent(variables={"WORDS": words})
        with pytest.raises(UserFunctionError, match=r"Its answer has \d+ bytes"):
            run_alone(gateway, agent)
        assert [session.reward for session in run(gateway, agent)] == [1.0]


def test_lines_that_a_library_prints_are_no_answers(make_agent, serve, tmp_path):
    """As it is imported, before the program has the output for itself."""
    lines = '{"id": [1]}\n{"failure": "no"}\n[1]\n7\n{'
    (tmp_path / "sitecustomize.py").write_text(f"print({lines!r}, flush=True)\n")
    path = os.pathsep.join([str(tmp_path), str(CLIENTS)])
    with serve([RIGHT]) as (_, gateway):
        (session,) = run(gateway, make_agent(variables={"PYTHONPATH": path}))
        assert session.reward == 1.0


def run_alone(gateway, agent, number=0):
    session = gateway.session()
    return asyncio.run(
        agent({"task": number}, base_url=session.base_url, api_key=session.key)
    )


def begin(gateway, agent):
    """Begins an episode in a thread's loop and returns its task and its loop."""
    session = gateway.session()
    call = agent({"task": 0}, base_url=session.base_url, api_key=session.key)
    return event_loop.submit(call)


def test_a_cancelled_episode_ends_its_request(make_agent, serve):
    with serve([Reply(hangs=True), RIGHT]) as (server, gateway):
        agent = make_agent()
        episode = begin(gateway, agent)
        server.wait_for("/generate", timeout=SECONDS)
        episode.cancel()
        server.wait_for("/abort_request", timeout=SECONDS)
        assert [session.reward for session in run(gateway, agent)] == [1.0]


def test_a_killed_process_fails_its_episode_and_the_next_starts_another(
    make_agent, serve
):
    with serve([Reply(hangs=True), RIGHT]) as (server, gateway):
        agent = make_agent()
        episode = begin(gateway, agent)
        server.wait_for("/generate", timeout=SECONDS)
        os.kill(agent.pid, signal.SIGKILL)
        with pytest.raises(UserFunctionError, match="ended with status"):
            episode.result(SECONDS)
        assert [session.reward for session in run(gateway, agent)] == [1.0]


def test_closing_ends_every_process(make_agent, serve):
    agent = make_agent()
    agent.prompts()
    pid = agent.pid
    agent.close()
    wait_until_gone([pid], seconds=0.0)
    assert agent.pid is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taskset": "no_such_taskset"}, "no_such_taskset"),
        ({"harness": "no_such_harness"}, "no_such_harness"),
        ({"env": {"agent": {"max_turn": 3}}}, "max_turn"),
        ({"options": {"no_such_option": 1}}, "no_such_option"),
    ],
)
def test_what_verifiers_refuses_is_an_error_with_its_words(
    make_agent, arguments, message
):
    with pytest.raises(ConfigurationError, match=message):
        make_agent(**arguments).prompts()


def test_an_agent_that_is_dropped_ends_its_process(make_agent, verifiers_python):
    agent = VerifiersAgent(
        "weather_taskset",
        python=verifiers_python,
        environment={"PYTHONPATH": str(CLIENTS)},
    )
    agent.prompts()
    pid = agent.pid
    del agent
    gc.collect()
    wait_until_gone([pid])


def test_a_setting_that_is_not_json_is_refused(make_agent):
    with pytest.raises(ConfigurationError, match="travel as JSON"):
        make_agent(options={"rows": {1, 2}})


def test_a_program_of_the_harness_reads_no_jobs(make_agent, serve):
    with serve([RIGHT]) as (_, gateway):
        harness = {"id": "talking_harness", "turns": 1}
        agent = make_agent(harness=harness, variables={"READS_INPUT": "1"})
        (session,) = run(gateway, agent)
        assert session.turns[0].prompt.messages[-1]["content"] == "0 bytes"


def test_a_copy_in_another_process_starts_its_own(make_agent):
    agent = make_agent()
    assert len(agent.prompts()) == 2
    with pickle.loads(pickle.dumps(agent)) as copy:
        assert copy.pid is None
        assert copy.prompts() == agent.prompts()
        assert copy.pid != agent.pid

"""Agents that are programs: what they are given, what is kept, and how they end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.collecting import tasks
from helpers.waiting import wait_until, wait_until_gone

from torchrl_sglang import (
    AgentProgram,
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWrapper,
)
from torchrl_sglang.errors import CollectionError, ConfigurationError, GatewayError
from torchrl_sglang.gateway.programs.process import (
    ProcessTree,
    ProgramLimits,
    TreeRunner,
)
from torchrl_sglang.gateway.programs.program import INHERITED

SECONDS = 60.0
"""For a tree to be gone, on a busy machine."""

URL = {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-1"}
OWN = {
    "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
    "OPENAI_API_KEY": "sk-1",
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
    "ANTHROPIC_API_KEY": "sk-1",
}

ASK = """
import json, os, sys, urllib.request
body = {"messages": [{"role": "user", "content": sys.stdin.read()}], "max_tokens": 4}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
    },
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""

TREE = """
trap '' TERM
setsid sleep 1000 & echo $! >pids
(setsid sh -c 'sleep 1000 & echo $! >>pids' &)
while [ $(wc -l <pids) -lt 2 ]; do :; done
echo $$ >>pids; mv pids begun
wait; sleep 1000
"""
"""A shell that ignores SIGTERM, a child in another session, and an orphan."""


@pytest.fixture
def gateway(fake_engine):
    with Gateway(fake_engine) as gateway:
        yield gateway


def run(program, task=None):
    return asyncio.run(program({} if task is None else task, **URL))


def keep(found):
    """Returns a reward function that hands its arguments to a list."""

    def reward(task, result):
        found.append((task, result))
        return 0.5

    return reward


def pids_of(folder):
    return [int(line) for line in (folder / "begun").read_text().split()]


def begun(folder):
    """Waits until the tree has begun, and returns its processes."""
    wait_until((folder / "begun").exists, SECONDS)
    return pids_of(folder)


def test_a_program_in_a_session_of_its_own(gateway):
    found = []
    program = AgentProgram(
        command=[sys.executable, "-S", "-c", ASK],
        stdin="1+{number}=",
        reward=keep(found),
    )
    groups = asyncio.run(
        gateway.run_agents(program, [{"number": 2}, {"number": 3}], group_size=2)
    )
    assert [len(group) for group in groups] == [2, 2]
    said = {
        (session.turns[0].prompt.messages[0]["content"], session.turns[0].text)
        for group in groups
        for session in group
    }
    assert {content for content, _ in said} == {"1+2=", "1+3="}
    assert {text for _, text in said} == {r.stdout.removesuffix("\n") for _, r in found}
    for group in groups:
        assert [session.reward for session in group] == [0.5, 0.5]
        assert all(len(session.turns) == 1 for session in group)
    for task, result in found:
        assert task["number"] in (2, 3)
        assert (result.status, result.timed_out, result.stderr) == (0, False, "")
        assert result.dropped_bytes == 0
        assert not result.folder.exists()


def test_in_a_collector(fake):
    program = AgentProgram(
        command=[sys.executable, "-S", "-c", ASK],
        stdin="{query}",
        reward=lambda task, result: float(task["answer"]),
    )
    with AsyncSGLang.connect(fake.url) as engine, Gateway(engine) as gateway:
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(engine),
            prompts=tasks(2),
            agent=program,
            gateway=gateway,
            groups_per_batch=2,
            group_size=2,
            total_groups=2,
        )
        (batch,) = collector
        collector.shutdown()
        assert sorted(batch["next", "reward"].flatten().tolist()) == [0, 0, 1, 1]
        idle = AsyncLLMCollector(
            policy=SGLangWrapper(engine),
            prompts=tasks(1),
            agent=AgentProgram(command=["true"], reward=lambda task, result: 0.0),
            gateway=gateway,
            groups_per_batch=1,
            total_groups=1,
            max_retries=0,
        )
        with pytest.raises(CollectionError, match="without a request to its session"):
            next(iter(idle))
        idle.shutdown()


def test_its_variables_are_those_that_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("RANK", "3")
    found = []
    code = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    program = AgentProgram(
        command=[sys.executable, "-S", "-c", code],
        environment={"HOME": "{folder}/home", "LEVEL": "{level}", "OPENAI_API_KEY": ""},
        folder=str(tmp_path / "{level}"),
        reward=keep(found),
    )
    (tmp_path / "7").mkdir()
    assert run(program, {"level": 7}) == 0.5
    ((_, result),) = found
    seen, folder = json.loads(result.stdout)
    assert folder == str(tmp_path / "7") == str(result.folder)
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    own = {"HOME": f"{folder}/home", "LEVEL": "7", "OPENAI_API_KEY": ""}
    # A Python in the C locale sets one more.
    seen.pop("LC_CTYPE", None)
    assert seen == {**inherited, **OWN, **own}
    assert (tmp_path / "7").is_dir()


def test_a_function_makes_the_command_and_another_one_the_folder():
    found = []

    def command(task, *, base_url, api_key, folder):
        return ["sh", "-c", "cat note; pwd; echo $1 $2", "-", base_url, api_key]

    async def prepare(task, folder):
        await asyncio.to_thread((folder / "note").write_text, f"{task}\n")

    program = AgentProgram(command=command, prepare=prepare, reward=keep(found))
    assert run(program, "Do it.") == 0.5
    ((_, result),) = found
    note, folder, given = result.stdout.splitlines()
    assert note == "Do it."
    assert folder == str(result.folder)
    assert given == f"{URL['base_url']} {URL['api_key']}"


def test_the_end_of_its_output_is_kept(caplog):
    found = []
    script = "head -c 300000 /dev/zero | tr '\\0' a; echo end; echo bad >&2; exit 3"
    program = AgentProgram(
        command=["sh", "-c", script], max_output=1000, reward=keep(found)
    )
    with caplog.at_level(logging.WARNING, logger="torchrl"):
        run(program)
    ((_, result),) = found
    assert result.stdout == "a" * 996 + "end\n"
    assert result.stderr == "bad\n"
    assert result.dropped_bytes == 300_004 - 1000
    assert result.status == 3
    assert "'sh' ended with status 3. bad" in caplog.text


def test_unread_input_does_not_matter():
    assert (
        run(
            AgentProgram(command=["true"], stdin="{x}", reward=lambda t, r: 1.0),
            {"x": "a" * 10**6},
        )
        == 1.0
    )


def test_children_end_with_the_program():
    found = []
    script = "sleep 1000 & echo $! ; setsid sleep 1000 & echo $!"
    run(AgentProgram(command=["sh", "-c", script], reward=keep(found)))
    ((_, result),) = found
    assert result.status == 0
    wait_until_gone(map(int, result.stdout.split()))


def test_it_is_ended_where_it_cannot_be_written_to(tmp_path):
    command = ["sh", "-c", "sleep 60 & echo $! >pid; wait"]
    tree = ProcessTree(
        command=command, environment=dict(os.environ), folder=tmp_path, stdin="\ud83d"
    )
    begun = time.monotonic()
    with pytest.raises(UnicodeEncodeError):
        TreeRunner().run(tree, ProgramLimits(seconds=60, most_bytes=10))
    assert time.monotonic() - begun < 30


def test_nothing_of_it_is_left_after_its_timeout(tmp_path):
    found = []
    program = AgentProgram(
        command=["sh", "-c", f"echo so far; {TREE}"],
        folder=tmp_path,
        # The tree has begun before that, or there is nothing to read below.
        timeout=5.0,
        reward=keep(found),
    )
    assert run(program) == 0.5
    ((_, result),) = found
    assert result.timed_out
    assert result.status >= 128
    assert result.stdout == "so far\n"
    assert len(pids_of(tmp_path)) == 3
    wait_until_gone(pids_of(tmp_path))


def test_nothing_of_it_is_left_when_its_run_is_cancelled(gateway):
    seen = []

    async def cancelled():
        program = AgentProgram(
            command=["sh", "-c", TREE],
            prepare=lambda task, folder: seen.append(folder),
            reward=None,
        )
        run = asyncio.ensure_future(gateway.run_agents(program, [0]))
        await asyncio.to_thread(wait_until, lambda: seen)
        pids = await asyncio.to_thread(begun, seen[0])
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        return pids

    pids = asyncio.run(cancelled())
    wait_until_gone(pids)
    wait_until(lambda: not seen[0].exists(), SECONDS)
    assert gateway.sessions == []


OWNER = f"""
import os, sys, tempfile
from pathlib import Path
from torchrl_sglang.gateway.programs import process
folder = Path(tempfile.mkdtemp())
print(folder, flush=True)
tree = process.ProcessTree(
    command=["sh", "-c", {TREE!r}],
    environment=dict(os.environ),
    folder=folder,
    temporary=folder,
)
limits = process.ProgramLimits(seconds=600.0, most_bytes=1000)
process.TreeRunner().run(tree, limits)
"""


def test_nothing_of_it_is_left_when_its_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    )
    with owner:
        folder = Path(owner.stdout.readline().strip())
        pids = begun(folder)
        owner.kill()
    wait_until_gone(pids)
    wait_until(lambda: not folder.exists(), SECONDS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"command": ["no-such-agent"]}, "no program 'no-such-agent' in PATH"),
        ({"command": ["./agent.sh"]}, "no program './agent.sh'; install it"),
        ({"command": ["true", "{txet}"]}, r"\{txet\}.*Did you mean \{text\}\?"),
        ({"command": ["true", "{list}"]}, "a list; only texts and numbers"),
        ({"stdin": "{zzz}"}, r"stdin names \{zzz\}.*there are text, list, base_url"),
        ({"folder": "/no/such/folder"}, "folder '/no/such/folder' is not there"),
        ({"command": lambda task, **given: "true"}, "got the text 'true'"),
        ({"command": lambda task, **given: None}, "a list of texts.*got None"),
    ],
)
def test_a_program_that_cannot_run_is_reported_and_drops_the_session(
    gateway, arguments, told
):
    program = AgentProgram(**{"command": ["true"], "reward": None, **arguments})
    with pytest.raises(GatewayError, match=told) as caught:
        asyncio.run(gateway.run_agents(program, [{"text": "a", "list": []}]))
    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert gateway.sessions == []


def test_a_reward_function_that_raises_drops_the_session(gateway):
    def reward(task, result):
        raise ValueError("no luck")

    program = AgentProgram(command=["true"], reward=reward)
    with pytest.raises(GatewayError, match="ValueError: no luck"):
        asyncio.run(gateway.run_agents(program, [0]))
    assert gateway.sessions == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"command": "claude -p"}, "got the text 'claude -p'; give shlex.split"),
        ({"command": []}, r"a list of texts.*got \[\]"),
        ({"command": ["a", 1]}, "a list of texts"),
        ({"reward": 1.0}, "reward must be a function, got 1.0"),
        ({"prepare": "x"}, "prepare must be a function"),
        ({"environment": {"A": 1}}, "environment must map names to texts, got 'A': 1"),
        ({"environment": ["A=1"]}, "environment must be a mapping"),
        ({"stdin": b"x"}, "stdin must be a text"),
        ({"timeout": 0}, "timeout must be a positive"),
        ({"max_output": 0}, "max_output must be an integer"),
        ({"container": 3}, "container must be an image's name or a Container, got 3"),
    ],
)
def test_wrong_arguments(arguments, told):
    with pytest.raises(ConfigurationError, match=told):
        AgentProgram(**{"command": ["true"], "reward": None, **arguments})

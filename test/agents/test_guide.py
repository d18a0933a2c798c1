"""The guide's examples run as they stand on its page."""

from __future__ import annotations

import asyncio
import os
import runpy
from typing import Any

import pytest
from helpers.agent_clients import (
    CLIENTS,
    ENVIRONMENTS,
    HELLO,
    ROME,
    SUNNY,
    WEATHER,
    Program,
    check_rows,
    job_of,
)
from helpers.scripted_server import Reply

from torchrl_sglang import AgentProgram

read_example = runpy.run_path(str(CLIENTS / "page_examples.py"))["read_example"]
LOOK = Reply(reasoning="They want to know.", text="I look.", calls=[ROME])
SECONDS = 300.0


@pytest.mark.parametrize(
    ("section", "environment", "last"),
    [
        ("openai-agents", "openai_agents", Reply(text=SUNNY)),
        ("pydantic-ai", "pydantic_ai", Reply(answer=WEATHER)),
        ("LangGraph and LangChain", "langchain", Reply(answer=WEATHER)),
    ],
)
def test_a_framework(running_of, serve, section, environment, last):
    program = Program(
        file="guide_page.py", environment=environment, variant=section, errors={}
    )
    client = running_of(program)
    with serve([LOOK, last]) as (server, gateway):
        session = gateway.session()
        report = client.run(job_of(session, [HELLO], timeout=SECONDS), SECONDS)
        assert report["error"] is None, client.log()
        assert (report["answer"], report["called"]) == (1.0, ["Rome"])
        gateway.set_reward(session, report["answer"])
        rows = gateway.to_tensordict([session])
        assert len(rows) == 1
        check_rows(rows, server.generated, 1.0)


@pytest.mark.parametrize(
    ("section", "environment", "tool", "key"),
    [
        ("Claude Code", "claude_code", "Bash", "command"),
        ("Codex", "codex", "exec_command", "cmd"),
    ],
)
def test_a_program(monkeypatch, serve, tmp_path, section, environment, tool, key):
    programs = ENVIRONMENTS / environment / "node_modules/.bin"
    if not programs.exists():
        pytest.skip(f"{programs} is not there; `make test-agents` makes it.")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    home.mkdir()

    def reward_of(task: Any, output: str) -> float:
        wrote = (folder / "note").read_text() if (folder / "note").exists() else ""
        return float(wrote == "fixed\n" and SUNNY in output)

    names: dict[str, Any] = {"AgentProgram": AgentProgram, "reward_of": reward_of}
    exec(read_example(section), names)
    task = {"text": HELLO, "folder": str(folder), "home": str(home)}
    call = Reply(text="I look.", calls=[(tool, {key: "echo fixed >note"})])
    with serve([call, Reply(text=SUNNY)]) as (server, gateway):
        ((session,),) = asyncio.run(gateway.run_agents(names["fix"], [task]))
        rows = gateway.to_tensordict([session])
        assert session.reward == 1.0, session.turns[-1].prompt.messages[-1]
        assert len(rows) == 1
        check_rows(rows, server.generated, 1.0)

"""Clients of the tests' own environment, each in a subprocess with some scenarios.

`make test-agents` runs all of them, with all scenarios.
"""

from __future__ import annotations

import re

import pytest
from helpers.agent_clients import CLIENTS, ROOT, SCENARIOS
from helpers.agent_matrix import check_cell
from helpers.agent_table import PROGRAMS

HERE = [name for name, program in PROGRAMS.items() if not program.environment]
DIAGONAL = [
    (HERE[number % len(HERE)], scenario) for number, scenario in enumerate(SCENARIOS)
]
REQUIREMENTS = ROOT / "test/agents/requirements"
GUIDE = ROOT / "docs/source/guides/agent_frameworks.rst"
PACKAGES = {
    "Claude Code": ["@anthropic-ai/claude-code"],
    "Claude Agent SDK": ["claude-agent-sdk"],
    "Codex": ["@openai/codex"],
    "AI SDK": ["ai"],
    "LangGraph, LangChain": ["langgraph", "langchain"],
    "AutoGen": ["autogen-agentchat"],
    "pydantic-ai": ["pydantic-ai-slim"],
    "Inspect": ["inspect-ai"],
    "aider": ["aider-chat"],
}
"""What is installed of a program, where that has another name."""


@pytest.mark.parametrize(
    ("running", "scenario"), sorted(DIAGONAL), indirect=["running"]
)
def test_a_client(running, scenario, cell, tmp_path):
    check_cell(running, scenario, home=tmp_path, **cell)


def test_every_cell_that_is_left_out_says_why():
    for program in PROGRAMS.values():
        assert (CLIENTS / program.file).exists()
        cells = {*program.without, *program.rows, *program.instead, *program.repeats}
        assert cells <= set(SCENARIOS)
        assert not set(program.without) & set(program.rows)
        assert all(program.without.values())
        assert all(why for _, why in program.rows.values())


def test_the_guide_names_the_versions_that_are_tried():
    pins = {}
    for path in REQUIREMENTS.glob("*.in"):
        found = re.findall(
            r"^([\w-]+)(?:\[.*\])?==(\S+)", path.read_text(), re.MULTILINE
        )
        pins |= {name: version for name, version in found if name not in pins}
    for path in REQUIREMENTS.glob("*/package.json"):
        pins |= dict(re.findall(r'"([@\w/-]+)": "(\d[^"]*)"', path.read_text()))
    table = re.findall(r"^   \* - (.+)\n     - (.+)$", GUIDE.read_text(), re.MULTILINE)
    named = {program: tried for program, tried in table if tried[0].isdigit()}
    assert len(named) >= len(PACKAGES)
    for program, tried in named.items():
        packages = PACKAGES.get(program, [program.lower().replace(" ", "-")])
        for package, version in zip(packages, tried.split(", "), strict=True):
            assert f"{pins[package]}.".startswith(f"{version}."), package

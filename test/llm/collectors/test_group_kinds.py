"""Kinds of groups that a collector is given, and the short form of their arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.collecting import length_reward

from torchrl_sglang import AgentGroups, EnvironmentGroups, FunctionGroups
from torchrl_sglang.collectors.runtime.contract import GroupKind
from torchrl_sglang.errors import ConfigurationError


async def ask_once(conversation, task):
    return "Go on." if len(conversation.turns) < 2 else None


def test_the_short_form_collects_the_same(make):
    functions = {"rewards": {"length": length_reward}, "step": ask_once}
    groups = FunctionGroups(**functions)
    (long,) = make(groups=groups, rewards=None, total_groups=2)
    (short,) = make(**functions, total_groups=2)
    assert len(long) == len(short) == 4
    assert set(long.keys(True, True)) == set(short.keys(True, True))
    assert long[-1]["next", "length"].item() > 0
    for key in (("next", "reward"), ("next", "done"), "step_count"):
        assert long[key].tolist() == short[key].tolist()
    # One kind may serve several collectors.
    assert len(next(iter(make(groups=groups, rewards=None)))) == 4


def test_a_kind_of_the_users_own_makes_the_groups(make):
    class Doubled(GroupKind):
        """Plain functions, with twice the number of turns."""

        def maker(self, setting):
            self.size = setting.size
            return FunctionGroups(rewards=length_reward, step=ask_once).maker(setting)

    kind = Doubled()
    (batch,) = make(groups=kind, rewards=None, group_size=3, total_groups=2)
    assert (kind.size, len(batch)) == (3, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": FunctionGroups()}, "rewards cannot be given with groups"),
        ({"groups": "functions", "rewards": None}, "env must be a function"),
        ({"gateway": object()}, "gateway is for agents"),
        ({"agent": print, "rewards": None}, "An agent needs a gateway, got None"),
        ({"step": ask_once, "env": print}, "cannot be given with env"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"max_turns": 0}, "max_turns must be"),
        ({"tool_parser": "xml"}, "tool_parser must be a function, got 'xml'"),
        ({"tolls": []}, "no argument 'tolls'. Did you mean 'tools'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**arguments)


def test_each_kind_checks_its_own_arguments():
    with pytest.raises(ConfigurationError, match="max_turns must be"):
        FunctionGroups(max_turns=0)
    with pytest.raises(ConfigurationError, match="env must be a function"):
        EnvironmentGroups("ChatEnv")
    with pytest.raises(ConfigurationError, match="An agent needs a gateway, got 'url'"):
        AgentGroups("url", print)


@pytest.mark.slow
def test_plain_functions_load_no_gateway_and_no_recorder():
    code = (
        "import sys; from torchrl_sglang import AsyncLLMCollector, FunctionGroups; "
        "print(*(name for name in sys.modules if name.startswith('torchrl_sglang.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    folders = {name.split(".")[1] for name in done.stdout.split()}
    assert "collectors" in folders
    assert not folders & {"gateway", "recording", "telemetry", "viewer", "trainers"}

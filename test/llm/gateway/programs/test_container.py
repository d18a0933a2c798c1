"""Programs in containers: what Docker and Podman are told, and that nothing is left.

A script stands in for Docker, and
writes down what it is told.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from helpers.waiting import wait_until

from torchrl_sglang import AgentProgram, Container
from torchrl_sglang.errors import ConfigurationError, GatewayError

SECONDS = 60.0
URL = {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-1"}

DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
for each in "$@"; do printf '%s\\n' "$each"; done >>"told"
echo >>"told"
for each in "$@"; do
    case $each in --env-file=*) cat "${each#--env-file=}" >variables ;; esac
done
case $1 in
    create) cat failure >&2 2>/dev/null && exit 125; exit 0 ;;
    start) echo "in $(pwd)"; cat; [ -e hangs ] && sleep 1000; exit 3 ;;
esac
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in for Docker; its folder."""
    path = tmp_path / "bin" / "docker"
    path.parent.mkdir()
    path.write_text(DOCKER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path.parent


def calls(docker):
    """Returns the arguments of each call."""
    told = (docker / "told").read_text()
    return [call.splitlines() for call in told.split("\n\n") if call]


def run(program, **given):
    return asyncio.run(program({"n": 3}, **{**URL, **given}))


def test_what_a_container_is_given(docker):
    found = []

    def reward(task, result):
        found.append(result)
        return 1.0

    program = AgentProgram(
        command=["agent", "--in", "{folder}", "{n}"],
        environment={"LEVEL": "{n}"},
        stdin="Number {n}.",
        container=Container(image="agent:1", options=["--memory=4g"]),
        reward=reward,
    )
    assert run(program) == 1.0
    (result,) = found
    assert (result.status, result.stdout.splitlines()[1]) == (3, "Number 3.")
    create, start, remove = calls(docker)
    name = start[-1]
    assert create[:2] == ["create", "--pull=never"]
    assert create[-5:] == ["agent:1", "agent", "--in", "/work", "3"]
    for option in (
        *(f"--name={name}", "--network=host", f"--volume={result.folder}:/work"),
        *("--workdir=/work", "--interactive", "--memory=4g"),
        f"--user={os.getuid()}:{os.getgid()}",
    ):
        assert option in create
    assert start == ["start", "--attach", "--interactive", name]
    assert remove == ["rm", "--force", "--volumes", name]
    # The key is in a file, which is gone, and in no command line.
    assert not any("sk-1" in word for call in calls(docker) for word in call)
    assert dict(
        line.split("=", 1) for line in (docker / "variables").read_text().split()
    ) == {
        "HOME": "/work",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "sk-1",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": "sk-1",
        "LEVEL": "3",
    }


def test_it_is_removed_after_its_timeout(docker):
    (docker / "hangs").touch()
    results = []
    program = AgentProgram(
        command=["agent"],
        container="agent:1",
        timeout=3.0,
        reward=lambda task, result: results.append(result) or 0.0,
    )
    assert run(program) == 0.0
    assert results[0].timed_out
    assert [call[0] for call in calls(docker)] == ["create", "start", "rm"]


def test_it_is_removed_when_its_run_is_cancelled(docker):
    (docker / "hangs").touch()

    async def cancelled():
        program = AgentProgram(command=["agent"], container="agent:1", reward=None)
        run = asyncio.ensure_future(program({}, **URL))
        await asyncio.to_thread(wait_until, lambda: "start" in told(), SECONDS)
        run.cancel()
        await asyncio.wait([run])

    def told():
        return (docker / "told").read_text() if (docker / "told").exists() else ""

    asyncio.run(cancelled())
    wait_until(lambda: "rm\n--force" in told(), SECONDS)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Cannot connect to the Docker daemon at unix://x.", "Start its daemon"),
        ("Error: No such image: agent:1", "`docker pull agent:1` fetches it"),
        ("Something else.", "no container of 'agent:1': Something else."),
    ],
)
def test_refused_containers_are_reported(docker, said, told):
    (docker / "failure").write_text(said)
    program = AgentProgram(command=["agent"], container="agent:1", reward=None)
    with pytest.raises(GatewayError, match=told):
        run(program)
    # Whatever has been made of it is removed.
    assert [call[0] for call in calls(docker)] == ["create", "rm"]


def test_how_another_network_reaches_the_gateway(docker):
    given = {"command": ["agent"], "reward": None}
    inner = Container(image="agent:1", network="bridge")
    with pytest.raises(ConfigurationError, match="cannot reach a gateway on 127.0.0.1"):
        run(AgentProgram(container=inner, **given))
    named = Container(image="agent:1", network="bridge", address="gateway.local")
    run(AgentProgram(container=named, **given))
    variables = (docker / "variables").read_text()
    assert "OPENAI_BASE_URL=http://gateway.local:9/v1\n" in variables


def test_variables_of_several_lines(docker):
    program = AgentProgram(
        command=["agent"],
        container="agent:1",
        environment={"KEY": "a\nb"},
        reward=None,
    )
    with pytest.raises(ConfigurationError, match="The variable KEY has several lines"):
        run(program)


def test_without_docker_and_podman(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigurationError, match="neither docker nor podman is in PATH"
    ):
        AgentProgram(command=["agent"], container="agent:1", reward=None)
    with pytest.raises(ConfigurationError, match="'podman' is not in PATH"):
        Container(image="agent:1", runtime="podman")
    with pytest.raises(ConfigurationError, match="runtime='lxc' is not one of"):
        Container(image="agent:1", runtime="lxc")
    with pytest.raises(ConfigurationError, match="options must be a list"):
        Container(image="agent:1", options="--init")

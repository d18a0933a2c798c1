"""Tasks of Harbor and an environment of OpenEnv, through verifiers, without a network.

Harbor's tests and their reward are in ``/tests`` and ``/logs``, and the subprocess
runtime has no file system of its own: the interpreter is started in one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import requests
from helpers.agent_clients import check_rows
from helpers.scripted_server import Reply
from helpers.waiting import wait_until

from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.gateway.adapters.verifiers_agent import VerifiersAgent

APART = """#!/bin/sh
exec unshare --map-root-user --mount sh -c '
root=$0 && mount -t tmpfs tmpfs "$root" || exit 1
for path in /*; do
  if [ -L "$path" ]; then cp -P "$path" "$root"
  elif [ -d "$path" ]; then mkdir "$root$path" && mount --rbind "$path" "$root$path"
  fi
done
exec chroot "$root" "$@"' @root @python "$@"
"""
"""Runs a Python below a root of its own, where folders can be made."""

TOML = 'schema_version = "1.4"\n[environment]\n'
INSTRUCTION = 'Create a file called hello.txt with "Hello, world!" as the content.'
TEST = """#!/bin/bash
[ "$(cat hello.txt)" = "Hello, world!" ] && solved=1 || solved=0
echo "{\\"reward\\": $solved, \\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json
"""
"""Harbor's hello-world, with a test that downloads nothing."""


@pytest.fixture
def harbor_dataset(tmp_path, tasksets_python):
    """The options of Harbor's taskset for tasks in a repository of this machine."""
    if not list(Path(tasksets_python).parents[1].glob("lib/*/site-packages/harbor")):
        pytest.skip("Harbor needs Python 3.12.")
    task = tmp_path / "tasks/hello"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text(TOML)
    (task / "instruction.md").write_text(INSTRUCTION)
    (task / "tests/test.sh").write_text(TEST)
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "Tasks")):
        subprocess.run(["git", *command], cwd=task.parent, check=True)
    source = {"git_url": task.parent.as_uri(), "git_commit_id": "HEAD", "path": "hello"}
    tasks = [{"name": "hello", **source}]
    dataset = {"name": "hello", "version": "1.0", "description": "", "tasks": tasks}
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([dataset]))
    return {"dataset": "hello", "registry_path": str(registry)}


@pytest.fixture
def python_apart(tmp_path, tasksets_python):
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("This machine allows no namespaces.")
    root, program = tmp_path / "root", tmp_path / "bin" / "python"
    root.mkdir()
    program.parent.mkdir()
    apart = APART.replace("@root", str(root)).replace("@python", tasksets_python)
    program.write_text(apart)
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("printf 'Hello, world!' >hello.txt", 1.0),
        pytest.param("touch hello.txt", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_task_of_harbor(
    serve, harbor_dataset, python_apart, tasksets_python, tmp_path, command, reward
):
    script = [Reply(calls=[("bash", {"command": command})]), Reply(text="Done.")]
    path = f"{Path(tasksets_python).parent}:{os.environ['PATH']}"
    with (
        serve(script) as (server, gateway),
        VerifiersAgent(
            "harbor",
            options=harbor_dataset,
            harness="bash",
            python=python_apart,
            environment={"HOME": str(tmp_path), "PATH": path},
        ) as agent,
    ):
        ((session,),) = asyncio.run(gateway.run_agents(agent, agent.prompts()))
        assert session.turns[0].prompt.messages[-1]["content"] == INSTRUCTION
        assert session.reward == reward
        assert session.metrics == {"reward": reward, "files": 1.0}
        check_rows(gateway.to_tensordict([session]), server.generated, reward)
    assert not Path("/logs/verifier/reward.json").exists()


@pytest.fixture
def openenv_url(tmp_path, tasksets_python):
    """The echo environment of ``openenv init``, as it comes."""
    find = "import openenv.cli.templates as t; print(t.__path__[0])"
    found = subprocess.check_output([tasksets_python, "-c", find], text=True)
    names = {"NAME": "echo", "CLASS_NAME": "Echo", "TITLE_NAME": "Echo"}
    folder = tmp_path / "echo"
    shutil.copytree(Path(found.strip()) / "openenv_env", folder)
    for path in folder.rglob("*.py"):
        text = path.read_text()
        for name, value in names.items():
            text = text.replace(f"__ENV_{name}__", value)
        path.with_name(path.name.replace("__ENV_NAME__", "echo")).write_text(text)
    port = find_free_port()
    command = [tasksets_python, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder)
    try:
        wait_until(lambda: is_healthy(port), seconds=300.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def is_healthy(port):
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def test_an_environment_of_openenv(serve, openenv_url, tasksets_python):
    """It rewards each letter with 0.1, in each of two turns."""
    script = [Reply(text="hey"), Reply(text='{"message": "hi"}')]
    with (
        serve(script) as (server, gateway),
        VerifiersAgent(
            "openenv",
            options={"base_url": openenv_url},
            harness="null",
            env={"player": {"max_turns": 2}},
            python=tasksets_python,
        ) as agent,
    ):
        ((session,),) = asyncio.run(gateway.run_agents(agent, agent.prompts()))
        _, second = session.turns
        seen = json.loads(second.prompt.messages[-1]["content"])["observation"]
        assert seen["echoed_message"] == "hey"
        check_rows(gateway.to_tensordict([session]), server.generated, 0.5)

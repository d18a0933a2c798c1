"""Codex, which runs without its user; what it is told next resumes that."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from common import WEATHER, Job, serve

PROGRAM = Path(__file__).parents[3] / ".agents/codex/node_modules/.bin/codex"
SECONDS = 50
SETTINGS = """\
model = "policy"
model_provider = "gateway"
sandbox_mode = "danger-full-access"
approval_policy = "never"

[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "GATEWAY_KEY"
wire_api = "responses"
stream_idle_timeout_ms = {timeout}
"""


class CodexError(Exception):
    """The program ended with this message."""


class ContextExhaustedError(CodexError):
    """The program told its user that the context is full."""


def run(job: Job) -> Any:
    home = Path(os.environ["HOME"]) / Path(job.folder).name
    home.mkdir(exist_ok=True)
    settings = SETTINGS.format(base_url=job.base_url, timeout=int(1000 * job.timeout))
    if job.retries is not None:
        settings += f"request_max_retries = {job.retries}\n"
        settings += f"stream_max_retries = {job.retries}\n"
    (home / "config.toml").write_text(settings)
    (home / "schema.json").write_text(json.dumps(WEATHER))
    try:
        for number, content in enumerate(job.messages):
            answer = tell(job, content, home, resumed=bool(number))
    finally:
        job.read_calls()
    return json.loads(answer) if job.structured else answer


def tell(job: Job, content: str, home: Path, *, resumed: bool) -> str:
    options = ["--skip-git-repo-check", "--json"]
    if job.structured:
        options += ["--output-schema", str(home / "schema.json")]
    which = ["resume", "--last"] if resumed else []
    done = subprocess.run(
        [str(PROGRAM), "exec", *which, *options, "-"],
        input=content,
        cwd=job.folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "CODEX_HOME": str(home),
            "GATEWAY_KEY": job.key,
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [each for each in events if each["type"] == "turn.failed"]
    if done.returncode or failed:
        too_long = "context window" in done.stdout
        raise (ContextExhaustedError if too_long else CodexError)(done.stdout)
    items = [each["item"] for each in events if each["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"][-1]


if __name__ == "__main__":
    serve(run)

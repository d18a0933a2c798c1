"""Claude Code, which runs without its user; what it is told next continues that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import WEATHER, Job, serve

PROGRAM = Path(__file__).parents[3] / ".agents/claude_code/node_modules/.bin/claude"
if sys.argv[1:] == ["sdk"]:
    # The one in Anthropic's SDK for Python is newer.
    import claude_agent_sdk

    PROGRAM = Path(claude_agent_sdk.__file__).parent / "_bundled/claude"
SECONDS = 50
"""Beside the time-out of a request."""


class ClaudeCodeError(Exception):
    """The program ended with this message."""


class PromptTooLongError(ClaudeCodeError):
    """The program told its user to make the conversation shorter."""


def run(job: Job) -> Any:
    try:
        for number, content in enumerate(job.messages):
            answer = tell(job, content, ["--continue"] * bool(number))
    finally:
        job.read_calls()
    return answer


def tell(job: Job, content: str, options: list[str]) -> Any:
    if job.structured:
        options = [*options, "--json-schema", json.dumps(WEATHER)]
    given = {"API_TIMEOUT_MS": str(int(1000 * job.timeout))}
    if job.retries is not None:
        given["CLAUDE_CODE_MAX_RETRIES"] = str(job.retries)
    done = subprocess.run(
        [
            *(str(PROGRAM), "-p", "--model", "claude-sonnet-4-5"),
            *("--output-format", "json", "--allowedTools", "Bash"),
            *options,
        ],
        input=content,
        cwd=job.folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "ANTHROPIC_BASE_URL": job.url,
            "ANTHROPIC_API_KEY": job.key,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **given,
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS + job.timeout,
        check=False,
    )
    if not done.stdout.startswith(("{", "[")):
        raise ClaudeCodeError(done.stdout)
    said = json.loads(done.stdout)
    said = said[-1] if isinstance(said, list) else said
    if said["is_error"]:
        too_long = "too long" in str(said.get("result"))
        raise (PromptTooLongError if too_long else ClaudeCodeError)(done.stdout)
    return said["structured_output"] if job.structured else said["result"]


if __name__ == "__main__":
    serve(run)

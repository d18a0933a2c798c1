"""aider: a session in a folder, whose model edits files with text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aider.main import main
from common import Job, serve


class ContextWindowExhaustedError(Exception):
    """aider told its user so, and ended."""


def run(job: Job) -> Any:
    os.chdir(job.folder)
    # It looks prices up in the network, unless it has done so lately.
    prices = Path.home() / ".aider/caches/model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True, exist_ok=True)
    prices.write_text('{"none": {}}')
    coder = main(
        [
            *("--model", "openai/policy", "--openai-api-base", job.base_url),
            *("--openai-api-key", job.key, "--timeout", str(job.timeout)),
            *("--no-git", "--yes-always", "--no-check-update", "--analytics-disable"),
            *("--no-show-model-warnings", "--no-show-release-notes"),
            *("--edit-format", "diff"),
            *([] if job.stream else ["--no-stream"]),
            "weather.txt",
        ],
        return_coder=True,
    )
    for content in job.messages:
        answer = coder.run(with_message=content)
    if coder.num_exhausted_context_windows:
        raise ContextWindowExhaustedError
    return answer


if __name__ == "__main__":
    serve(run)

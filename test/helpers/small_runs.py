"""GRPO runs on a tiny model: a reward, and files for examples/grpo/train.py."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

_REWARD = "def few(conversation, task):\n    return -len(conversation.response) / 10\n"
_RUN = {
    "prompts": "prompts.jsonl",
    "rewards": "own_reward:few",
    "generate_kwargs": {"max_new_tokens": 8},
    "group_size": 4,
    "groups_per_batch": 4,
    "checkpoint_every": 1,
    "lr": 1e-3,
    # What a file for one machine has; the job's servers take its place.
    "engine": {"num_replicas": 2},
    "output": "run",
}


def few_tokens(conversation, task) -> float:
    """Reward for a short last response."""
    return -len(conversation.turns[-1].token_ids) / 10


def write_run(folder: Path, model: str, steps: int) -> list[str]:
    """Writes what a run reads; returns the words of its program."""
    rows = [{"query": f"Say {number}."} for number in range(24)]
    text = "\n".join(map(json.dumps, rows))
    (folder / "prompts.jsonl").write_text(text)
    (folder / "own_reward.py").write_text(_REWARD)
    (folder / "run.yaml").write_text(yaml.safe_dump({**_RUN, "steps": steps}))
    return ["run.yaml", f"model={model}"]

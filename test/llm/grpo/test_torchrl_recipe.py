"""TorchRL's own recipe on this package's engine, with its imports changed.

What else had to change is in ``helpers/torchrl_recipe.py``: nothing of it is this
package's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.torchrl_recipe import WANDB, copy_recipe

ROOT = str(Path(__file__).parents[3])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# Each of its environments is a collector of its own in an asynchronous run.
@pytest.mark.parametrize(("mode", "num_envs"), [("sync", 2), ("async", 1)])
def test_it_runs_from_beginning_to_end(tmp_path, tiny_model_path, mode, num_envs):
    folder = copy_recipe(tmp_path / "recipe", tiny_model_path)
    done = subprocess.run(
        [sys.executable, f"grpo-{mode}.py", f"mode={mode}", f"env.num_envs={num_envs}"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([ROOT, str(folder)]),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hub"),
            "WANDB_FILE": str(tmp_path / "metrics.jsonl"),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Each update after the first one follows a step of the trainer.
    assert "Weights of version 3 on 1 server(s)" in done.stdout + done.stderr
    values = read_metrics(tmp_path / "metrics.jsonl")
    assert {"loss_objective", "reward_mean", "grad_norm"} <= values.keys()
    # Before the first step, trainer and engine are the same model.
    assert abs(values["kl_approx"][0]) < 1e-3 or mode == "async"


def read_metrics(path):
    values = defaultdict(list)
    for line in path.read_text().splitlines():
        for name, value in json.loads(line).items():
            values[name].append(value)
    return values


def test_wandb(restored_engine, tiny_model_path, tmp_path):
    """TorchRL's logger of our own run, which goes on with the same run."""
    (tmp_path / "wandb.py").write_text(WANDB)
    command = [
        sys.executable,
        f"{ROOT}/examples/grpo/train.py",
        f"{ROOT}/examples/grpo/cpu.yaml",
        "groups_per_batch=4",
        f"output={tmp_path / 'run'}",
        "logger=wandb",
        "project=sums",
        f"model={tiny_model_path}",
        f"engine={restored_engine.server_url}",
        "resume=auto",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)]),
        "WANDB_FILE": str(tmp_path / "metrics.jsonl"),
    }
    for steps in (2, 3):
        done = subprocess.run(
            [*command, f"steps={steps}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    values = read_metrics(tmp_path / "metrics.jsonl")
    first, second = values["init"]
    assert first["project"] == "sums"
    assert values["group_size"] == [8]
    assert second["id"] == "run"
    assert second["resume"] == "must"
    assert len(values["batch/reward"]) == 3
    # A table of responses, at the first step of ten.
    (table,) = values["samples/responses"]
    assert table
    assert all({"prompt", "response", "reward"} <= row.keys() for row in table)

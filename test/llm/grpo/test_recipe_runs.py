"""Whole runs of the recipe on CPU."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from statistics import fmean

import pytest
import torch
from helpers.forked_starts import trainer_python
from helpers.log_probs import TOLERANCE, difference
from helpers.recipe import SMALL
from transformers import AutoModelForCausalLM

from torchrl_sglang.errors import ConfigurationError

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

LIMIT_SECONDS = 200.0
"""Longest time for a run to reach a step."""


@pytest.fixture(scope="module")
def grpo_train():
    import grpo_train

    return grpo_train


def read_rollouts(folder):
    text = (folder / "rollouts.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert all(isinstance(row["prompt"], str) for row in rows)
    return rows


def read_scalar(folder, name):
    (path,) = (folder / "logs").rglob(f"{name}.csv")
    with path.open() as file:
        return {int(step): float(value) for step, value in csv.reader(file)}


def test_a_synchronous_run_that_goes_on(
    small, restored_engine, grpo_train, tmp_path, capsys
):
    engine, folder = restored_engine, tmp_path / "run"
    cfg = small("sync", "+weight_sync.verify=true")
    grpo_train.train(cfg)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"3 steps, written to {folder}. ")
    assert "bounds the run (collect" in last
    # The engine serves what was saved, and that has been trained.
    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert difference(engine, trained) < TOLERANCE
    rows = read_rollouts(folder)
    assert Counter(row["step"] for row in rows) == dict.fromkeys((1, 2, 3), 16)
    assert set(Counter(row["index"] for row in rows).values()) == {4}
    # Nothing was generated with weights that were not the newest.
    assert read_scalar(folder, "batch/age_max") == dict.fromkeys((1, 2, 3), 0.0)
    assert list(read_scalar(folder, "eval/accuracy")) == [0, 2]
    assert list(read_scalar(folder, "optim/lr").values()) == [cfg.optimizer.lr] * 3
    with pytest.raises(ConfigurationError, match="train.resume=true"):
        grpo_train.train(cfg)
    # With more to do, it goes on with the same weights and the same optimizer; another
    # logger begins.
    cfg.train.resume = True
    cfg.logging.backend = None
    cfg.train.total_dialog_turns += 16
    with ExitStack() as stack:
        run = grpo_train.Run(cfg, stack)
        for name, value in trained.state_dict().items():
            assert torch.equal(run.model.state_dict()[name], value)
        assert difference(engine, run.model) < TOLERANCE
        (state, *_) = run.learner.optimizer.state_dict()["state"].values()
        assert int(state["step"]) == 6
        run.loop()
    assert run.step == 4
    assert run.clock.totals["save"] > 0
    rows = read_rollouts(folder)
    assert set(Counter(row["index"] for row in rows).values()) == {4}
    assert len({row["index"] for row in rows}) == 16
    other = cfg.copy()
    other.env.repeats = 2
    with pytest.raises(ConfigurationError, match=r"saved with env\.repeats=4"):
        grpo_train.train(other)


def test_an_asynchronous_run(small, restored_engine, grpo_train, tmp_path, capsys):
    cfg = small(
        "async",
        "logging.backend=tensorboard",
        "train.use_kl_to_ref=true",
        "train.kl_to_ref_coeff=0.1",
        "train.entropy_coeff=0.01",
        "train.epochs=2",
        "train.weight_update_frequency=2",
    )
    grpo_train.train(cfg)
    assert "bounds the run" in capsys.readouterr().out.splitlines()[-1]
    rows = read_rollouts(tmp_path / "run")
    assert len(rows) == 48
    # Also what was trained after the last update that was due.
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert difference(restored_engine, trained) < TOLERANCE
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Below it is a folder of hyperparameters.
    folders = {path.parent for path in (tmp_path / "run").rglob("events.*")}
    events = EventAccumulator(str(min(folders, key=lambda path: len(path.parts))))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {
        "batch/reward",
        "loss/kl_to_ref",
        "loss/entropy",
        "rollout_corr/rollout_is_mean",
        "optim/grad_norm",
        "time/tokens_per_second",
    } <= names
    ages = [event.value for event in events.Scalars("batch/age_max")]
    assert max(ages) <= cfg.train.max_staleness
    # Before the first update, trainer and engine are the same model.
    (first, *_) = events.Scalars("rollout_corr/rollout_is_mean")
    assert first.value == pytest.approx(1.0, abs=1e-3)


def test_lora(small, lora_engine, peft_models, grpo_train, tmp_path):
    """The adapter alone is trained, sent and saved."""
    cfg = small(
        "sync",
        f"inference_model.url={lora_engine.server_url}",
        "train_model.lora.enabled=true",
        "train_model.lora.r=4",
        "train.use_kl_to_ref=true",
        "train.kl_to_ref_coeff=0.1",
        "train.correction=bypass_ppo_clip",
        # A step of the optimizer for each batch.
        "train.optim_batch_size=16",
    )
    with ExitStack() as stack:
        run = grpo_train.Run(cfg, stack)
        run.loop()
        run.finish()
        (answer,) = run.engine.generate(
            input_ids=[[5, 6, 7, 8]],
            sampling_params={"max_new_tokens": 6, "ignore_eos": True},
            return_logprobs=True,
        )
        assert peft_models.difference(answer, [5, 6, 7, 8], run.model) < TOLERANCE
        # None where another test has changed the servers' base weights: then whole
        # weights are sent.
        for name in run.engine.adapters:
            run.engine.unload_adapter(name)
    divergence = read_scalar(tmp_path / "run", "loss/kl_to_ref")
    assert divergence[1] == pytest.approx(0.0, abs=1e-3)
    assert divergence[3] > 0
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()
    (*_, path) = run.checkpoints.paths()
    saved = torch.load(path, weights_only=False)["learner"]["model"]
    assert all("lora_" in name for name in saved)


def wait_for_step(process, rollouts, step):
    """Waits until a run has trained on a batch after a step."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if rollouts.exists() and f'{{"step": {step + 1},' in rollouts.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(f"The run did not reach step {step + 1}: {process.poll()}")


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("async", [3]),
        pytest.param("async", [0, 7], marks=pytest.mark.slow),
        pytest.param("sync", [3, 8], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed(
    recipe, restored_engine, tiny_model_path, tmp_path, mode, kills
):
    """No prompt is lost or repeated, in two epochs, whenever the run is killed."""
    url, rollouts = restored_engine.server_url, tmp_path / "rollouts.jsonl"
    command = [
        trainer_python(),
        str(recipe / f"grpo-{mode}.py"),
        "+debug=cpu",
        *SMALL,
        f"logging.dir={tmp_path}",
        f"model.name={tiny_model_path}",
        f"inference_model.url={url}",
        "env.repeats=2",
        "train.total_dialog_turns=192",
        "train.resume=true",
    ]
    for step in (*kills, None):
        with (tmp_path / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        if step is None:
            status = process.wait(LIMIT_SECONDS)
            assert status == 0, (tmp_path / "log.txt").read_text()
        else:
            wait_for_step(process, rollouts, step)
            process.kill()
            process.wait()
    printed = (tmp_path / "log.txt").read_text()
    (start,) = re.findall(r"goes on after step (\d+)", printed)
    assert kills[-1] - 1 <= int(start) <= 11
    rows = read_rollouts(tmp_path)
    assert Counter(row["index"] for row in rows) == dict.fromkeys(range(48), 4)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 13), 16)
    (path,) = (tmp_path / "logs").rglob("loss/total.csv")
    steps = [int(line.partition(",")[0]) for line in path.read_text().splitlines()]
    assert steps == list(range(1, 13))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert difference(restored_engine, trained) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_scripts_from_beginning_to_end(recipe, tmp_path, mode):
    """With servers of their own; the rewards go up."""
    done = subprocess.run(
        [
            sys.executable,
            str(recipe / f"grpo-{mode}.py"),
            "+debug=cpu",
            f"logging.dir={tmp_path}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"20 steps, written to {tmp_path}")
    assert "bound" in last
    rewards = list(read_scalar(tmp_path, "batch/reward").values())
    # Half of it is learnt in the first steps.
    assert fmean(rewards[-10:]) > 1.2 * fmean(rewards[:2])
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_colocated(compose, saver_python, tiny_model_path, grpo_train, tmp_path, lora):
    """Servers sleep while the trainer trains; the memory saver is a stand-in."""
    cfg = compose(
        "sync",
        *SMALL,
        f"model.name={tiny_model_path}",
        "inference_model.colocated=true",
        f"+inference_model.server_args.python={saver_python}",
        f"train_model.lora.enabled={lora}",
    )
    with ExitStack() as stack:
        run = grpo_train.Run(cfg, stack)
        run.loop()
        assert run.step == 3
        assert not run.engine.asleep
        if not lora:
            assert difference(run.engine, run.model) < TOLERANCE
    assert len(read_rollouts(tmp_path / "run")) == 48


@pytest.mark.slow
def test_servers_on_ray(compose, ray_here, tiny_model_path, grpo_train, tmp_path):
    cfg = compose(
        "async",
        *SMALL,
        f"model.name={tiny_model_path}",
        "inference_model.launcher=ray",
        "inference_model.num_replicas=2",
        "+ray.launcher.strategy=SPREAD",
    )
    grpo_train.train(cfg)
    assert len(read_rollouts(tmp_path / "run")) == 48

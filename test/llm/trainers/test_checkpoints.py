"""A folder is of one run, and holds whole checkpoints."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.forked_starts import trainer_python
from torch.distributed.checkpoint import FileSystemWriter

from torchrl_sglang.errors import CheckpointError, ConfigurationError
from torchrl_sglang.trainers.checkpoints import (
    REST,
    RESULTS,
    ROLLOUTS,
    TRAINED,
    Checkpoints,
    forget_later_steps,
)

SAME = {"model": "a", "group_size": 8, "lora": None, "seed": 0}


def test_results_of_an_earlier_run(tmp_path):
    for name in RESULTS:
        folder = tmp_path / f"with_{name}"
        checkpoints = Checkpoints(folder, identity=SAME)
        assert checkpoints.load(False) is None
        (folder / name).write_text("x")
        with pytest.raises(ConfigurationError, match=f"{name} is of an earlier run"):
            checkpoints.load(False)
        with pytest.raises(ConfigurationError, match="has no checkpoint"):
            checkpoints.load(True)
        if name != TRAINED:
            assert checkpoints.load("auto") is None
            continue
        with pytest.raises(ConfigurationError, match="no checkpoint to go on with"):
            checkpoints.load("auto")


def test_a_run_that_never_trained_does_not_block_the_next(tmp_path):
    """What a run leaves that ended before its first step, or while it saved."""
    checkpoints = Checkpoints(tmp_path, keep=1, identity=SAME)
    (tmp_path / "logs").mkdir()
    (tmp_path / "rollouts.jsonl").touch()
    partial = tmp_path / "checkpoints" / "step_00000001.partial"
    partial.write_text("half of it")
    assert checkpoints.load(False) is None
    # It may be that of a run that is alive, as long as this one has not got on.
    assert partial.exists()
    checkpoints.save(1, {"weight": torch.ones(1)})
    checkpoints.save(2, {"weight": torch.ones(1)})
    checkpoints.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        "step_00000002"
    ]


def test_training_during_a_save_is_not_saved(tmp_path, monkeypatch):
    """A save returns before it is written; the next one waits for it."""
    slow, write = threading.Event(), FileSystemWriter.write_data

    def waits(*arguments):
        assert slow.wait(20)
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", waits)
    checkpoints = Checkpoints(tmp_path, identity=SAME)
    weight = torch.ones(3)
    checkpoints.save(1, {"weight": weight}, {"best": 0.5})
    weight.zero_()
    assert checkpoints.paths() == []
    threading.Timer(0.2, slow.set).start()
    checkpoints.save(2, {"weight": weight})
    assert [path.name for path in checkpoints.paths()] == ["step_00000001"]
    assert checkpoints.load(True)["best"] == 0.5
    checkpoints.restore({"weight": weight})
    assert weight.tolist() == [1, 1, 1]
    checkpoints.close()
    assert len(checkpoints.paths()) == 2


@pytest.mark.parametrize("where", ["write_data", "finish"])
def test_a_write_that_fails_is_reported(tmp_path, monkeypatch, where):
    checkpoints = Checkpoints(tmp_path, identity=SAME)
    checkpoints.save(1, {"weight": torch.ones(1)})
    checkpoints.wait()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, where, full)
        checkpoints.save(2, {"weight": torch.zeros(1)})
        with pytest.raises(CheckpointError, match="step_00000002.* No space left"):
            checkpoints.save(3, {"weight": torch.zeros(1)})
    assert [path.name for path in checkpoints.paths()] == ["step_00000001"]
    checkpoints.save(3, {"weight": torch.zeros(1)})
    checkpoints.wait()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_checkpoint_of_another_model(tmp_path):
    checkpoints = Checkpoints(tmp_path, identity=SAME)
    checkpoints.save(1, {"weight": torch.ones(3)})
    checkpoints.wait()
    for other in ({"weight": torch.ones(4)}, {"bias": torch.ones(3)}):
        with pytest.raises(CheckpointError, match="cannot be read into this run"):
            checkpoints.restore(other)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000001")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoints.restore({"weight": torch.ones(3)})


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PK")])
def test_a_damaged_checkpoint(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path, identity=SAME)
    for step in (1, 2):
        checkpoints.save(step, {"weight": torch.ones(3)})
    checkpoints.wait()
    newest = checkpoints.paths()[-1]
    damage(newest / REST)
    with pytest.raises(CheckpointError, match="step_00000002 is damaged.*Remove it"):
        checkpoints.load("auto")
    for other in ({"hello": 1}, [1, 2], {"step": 1, "identity": None}):
        torch.save(other, newest / REST)
        with pytest.raises(CheckpointError, match="step_00000002 is damaged"):
            checkpoints.load("auto")
    shutil.rmtree(newest)
    assert checkpoints.load("auto")["step"] == 1


def test_a_folder_that_is_gone(tmp_path):
    checkpoints = Checkpoints(tmp_path, identity=SAME)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="step_00000001 cannot be written"):
        checkpoints.save(1, {"weight": torch.ones(3)})


def test_a_kill_within_a_character(tmp_path):
    rollouts = tmp_path / ROLLOUTS
    whole = '{"step": 1, "response": "你"}\n'.encode()
    rollouts.write_bytes(whole + whole[:-5])
    forget_later_steps(tmp_path, 1)
    assert rollouts.read_bytes() == whole


def test_a_kill_leaves_whole_checkpoints(tmp_path):
    """Killed at arbitrary times, with other values in each checkpoint."""
    program = Path(__file__).with_name("save_program.py")
    for seed in range(2):
        process = subprocess.Popen([trainer_python(), str(program), str(tmp_path)])
        checkpoints = Checkpoints(tmp_path, identity=SAME)
        begun, deadline = len(checkpoints.paths()) and newest(checkpoints), time.time()
        while not checkpoints.paths() or newest(checkpoints) < begun + 3:
            assert process.poll() is None
            assert time.time() < deadline + 60
            time.sleep(0.001)
        time.sleep(random.Random(seed).random() / 20)
        process.kill()
        process.wait()
        weight, found = torch.zeros(1000, 100), None
        # A program that was forked ends a moment after the one that asked for it.
        while found != (found := newest(checkpoints)):
            checkpoints.restore({"weight": weight})
            step = checkpoints.load(True)["step"]
        assert step == found
        assert weight.eq(found).all()


def newest(checkpoints):
    return int(checkpoints.paths()[-1].name.removeprefix("step_"))


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_be_changed(tmp_path, name):
    saving = Checkpoints(tmp_path, identity=SAME)
    saving.save(1, {"weight": torch.ones(1)})
    saving.close()
    other = Checkpoints(tmp_path, identity={**SAME, name: "something else"})
    said = f"saved with {name}={SAME[name]!r}, and this run has {name}='something else'"
    with pytest.raises(ConfigurationError) as caught:
        other.load("auto")
    assert said in str(caught.value)

"""A folder is of one run, and holds whole checkpoints."""

from __future__ import annotations

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.checkpoints import RESULTS, Checkpoints

SAME = {"model": "a", "group_size": 8, "lora": None, "seed": 0}


def test_results_of_an_earlier_run(tmp_path):
    for name in RESULTS:
        folder = tmp_path / f"with_{name}"
        checkpoints = Checkpoints(folder, identity=SAME)
        assert checkpoints.load(False) is None
        (folder / name).write_text("x")
        with pytest.raises(ConfigurationError, match=f"{name} is of an earlier run"):
            checkpoints.load(False)
        assert checkpoints.load("auto") is None
        with pytest.raises(ConfigurationError, match="has no checkpoint"):
            checkpoints.load(True)


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
    checkpoints.save(1, {})
    assert not partial.exists()
    checkpoints.save(2, {})
    assert [path.name for path in checkpoints.paths()] == ["step_00000002.pt"]


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_be_changed(tmp_path, name):
    Checkpoints(tmp_path, identity=SAME).save(1, {})
    other = Checkpoints(tmp_path, identity={**SAME, name: "something else"})
    said = f"saved with {name}={SAME[name]!r}, and this run has {name}='something else'"
    with pytest.raises(ConfigurationError) as caught:
        other.load("auto")
    assert said in str(caught.value)

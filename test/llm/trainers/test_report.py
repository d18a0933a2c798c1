"""What a run tells at its end."""

from __future__ import annotations

from torchrl_sglang.trainers.report import summarize


def test_what_bounds_a_run():
    totals = {"collect": 6.0, "train": 3.0, "update": 1.0}
    said = "Training bounds the run: batches are complete."
    line = summarize(totals, said, in_turn=True)
    assert line.startswith("Generation bounds the run (")
    assert summarize(totals, said, in_turn=False).startswith(said.rstrip("."))
    slow = "The environment bounds the run: 4 of 4 wait."
    assert summarize(totals, slow, in_turn=True).startswith(slow.rstrip("."))
    for in_turn in (False, True):
        line = summarize({**totals, "save": 10.0}, said, in_turn=in_turn)
        assert line.startswith("Writing checkpoints bounds the run (collect 30%")

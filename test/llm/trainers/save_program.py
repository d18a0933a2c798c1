"""Saves checkpoints until it is killed: ``save_program.py FOLDER``."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch

from torchrl_sglang.trainers.checkpoints import Checkpoints

if __name__ == "__main__":
    identity = {"model": "a", "group_size": 8, "lora": None, "seed": 0}
    checkpoints = Checkpoints(Path(sys.argv[1]), identity=identity)
    state = checkpoints.load("auto")
    for step in count(1 if state is None else state["step"] + 1):
        checkpoints.save(step, {"weight": torch.full((1000, 100), float(step))})

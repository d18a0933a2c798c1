"""How long training stands still while a checkpoint is saved.

``python benchmarks/checkpoints.py --parameters 125`` (millions), also under torchrun.
Beside it what the same state takes that is gathered and written at once.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from script import read_options
from torchrl_sglang.trainers.checkpoints import Checkpoints
from torchrl_sglang.trainers.models import shard
from torchrl_sglang.trainers.ranks import TrainerRanks, find_trainer_ranks

WIDTH = 2048


class State:
    """Weights and AdamW's moments, as a learner has them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        self.optimizer.step()

    def state_dict(self, **options: Any) -> dict[str, Any]:
        found = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(**options)
        )
        return dict(zip(("model", "optimizer"), found, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_at_once(state: State, folder: Path, ranks: TrainerRanks) -> None:
    """Gathers everything on the first rank, and writes it to one file."""
    found = state.state_dict(full_state_dict=True, cpu_offload=True)
    if ranks.is_first:
        with (folder / "state.pt").open("wb") as file:
            torch.save(found, file)
            file.flush()
            os.fsync(file.fileno())
    ranks.barrier()


def main() -> None:
    # Millions of parameters, and a folder that all ranks see.
    given = read_options(__doc__, parameters=125.0, repeats=3, output=Path)
    ranks = find_trainer_ranks()
    device = ranks.device()
    layers = max(round(given.parameters * 1e6 / WIDTH**2), 1)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers))
    )
    state = State(model if ranks.size == 1 else shard(model, ranks, device))
    folder = ranks.share(given.output or Path(tempfile.mkdtemp()))
    checkpoints = Checkpoints(folder, identity={}, ranks=ranks)
    rows = []
    for number in range(given.repeats):
        start = time.perf_counter()
        save_at_once(state, folder, ranks)
        at_once = time.perf_counter() - start
        start = time.perf_counter()
        checkpoints.save(number, state)
        stands_still = time.perf_counter() - start
        checkpoints.wait()
        written = time.perf_counter() - start
        rows.append((at_once, stands_still, written))
    if ranks.is_first:
        middle = [sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True)]
        names = ("at_once_s", "stands_still_s", "until_written_s")
        found = {"parameters": layers * WIDTH**2, "ranks": ranks.size}
        found |= {
            name: round(each, 3) for name, each in zip(names, middle, strict=True)
        }
        print(json.dumps(found))
    ranks.end()


if __name__ == "__main__":
    main()

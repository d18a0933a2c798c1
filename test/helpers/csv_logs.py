"""Metrics of a run with TorchRL's CSV logger."""

from __future__ import annotations

from pathlib import Path


def logged(folder: Path, name: str) -> list[float]:
    """Returns the values of a metric that was logged below a folder, by step."""
    (file,) = folder.rglob(f"scalars/{name}.csv")
    return [float(line.split(",")[1]) for line in file.read_text().splitlines()]

"""Every place that CONTRIBUTING.md names for a change exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = [
    line
    for line in TEXT.partition("## Where does my change go")[2]
    .partition("\n## ")[0]
    .splitlines()
    if line.startswith("| ") and not line.startswith("| I want")
]


def places(row: str) -> list[str]:
    """Returns the paths in a row, with the names in their files."""
    quoted = re.findall(r"`([^`]+)`", row)
    return [word for word in quoted if "/" in word or ".py" in word or ".toml" in word]


def find(path: str) -> Path | None:
    candidates = (ROOT / path, ROOT / "torchrl_sglang" / path)
    return next((found for found in candidates if found.exists()), None)


def names_in(file: Path) -> set[str]:
    """Returns the names that a module defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return found


def test_the_table_is_found():
    assert len(ROWS) > 25


def problems_of(row: str) -> list[str]:
    """Returns which cells and places of a row do not exist."""
    _, wish, change, test, _ = row.split("|")
    problems = []
    if not wish.strip() or not (places(change) or "gpu" in change):
        problems.append(f"{row} has an empty cell.")
    for place in places(change) + places(test):
        path, _, name = place.partition("::")
        file = find(path)
        if file is None:
            problems.append(f"{path} does not exist.")
        elif name and name not in names_in(file):
            problems.append(f"{path} defines no {name}.")
    return problems


def test_every_place_exists():
    assert [problem for row in ROWS for problem in problems_of(row)] == []


def test_paths_targets_and_layers_in_the_text_exist():
    makefile = (ROOT / "Makefile").read_text()
    paths = re.findall(r"`((?:test|requirements|\.ci)/[^`:]+)", TEXT)
    targets = re.findall(r"\bmake ([a-z-]+)\b", TEXT)
    table = TEXT.partition("## Layers")[2]
    layers = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert paths
    assert targets
    assert layers
    absent = [path for path in paths if not (ROOT / path).exists()]
    absent += [each for each in targets if f".PHONY: {each}\n" not in makefile]
    layers = [f"torchrl_sglang/{layer}/__init__.py" for layer in layers]
    assert absent + [file for file in layers if not (ROOT / file).is_file()] == []

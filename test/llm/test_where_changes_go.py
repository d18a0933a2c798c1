"""Every place that CONTRIBUTING.md names for a change exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_place_exists(row):
    _, wish, change, test, _ = row.split("|")
    assert wish.strip()
    assert places(change) or "gpu" in change
    for place in places(change) + places(test):
        path, _, name = place.partition("::")
        found = find(path)
        assert found is not None, f"{path} does not exist."
        assert not name or name in names_in(found), f"{path} defines no {name}."


@pytest.mark.parametrize(
    "path", re.findall(r"`((?:test|requirements|\.ci)/[^`]+)`", TEXT)
)
def test_paths_in_the_text_exist(path):
    assert (ROOT / path.partition("::")[0]).exists()


@pytest.mark.parametrize("target", re.findall(r"\bmake ([a-z-]+)\b", TEXT))
def test_targets_exist(target):
    assert f".PHONY: {target}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    "layer",
    re.findall(r"^\| `(\w+)/` \|", TEXT.partition("## Layers")[2], re.MULTILINE),
)
def test_layers_exist(layer):
    assert (ROOT / "torchrl_sglang" / layer / "__init__.py").is_file()

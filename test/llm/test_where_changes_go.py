"""Every place that CONTRIBUTING.md or a folder's docstring names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchrl_sglang"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"``([\w/.]+\.(?:py|rst|md|json))(?:::(\w+))?``")


def names_in(file: Path) -> set[str]:
    """Returns the names that a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return names


def problems_of(folder: Path, path: str, name: str) -> list[str]:
    """Returns the error of a place in the docstring of a folder."""
    candidates = [parent / path for parent in (folder, PACKAGE, ROOT)]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        return [f"{folder.name}: {path} does not exist."]
    if name and name not in names_in(file):
        return [f"{folder.name}: {path} defines no {name}."]
    return []


def test_every_place_in_a_folder_s_docstring_exists():
    problems, places = [], 0
    for file in sorted(PACKAGE.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert docstring, f"{file} has no docstring."
        for path, name in PLACE.findall(docstring):
            places += bool(name)
            problems += problems_of(file.parent, path, name)
    assert problems == []
    assert places > 50


def test_paths_targets_and_layers_in_the_text_exist():
    makefile = (ROOT / "Makefile").read_text()
    paths = re.findall(r"`((?:test|requirements|\.ci)/[^`:]+)", TEXT)
    targets = re.findall(r"\bmake ([a-z-]+)\b", TEXT)
    table = TEXT.partition("## Layers")[2]
    layers = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    places = re.findall(r"`([\w/]+\.py)::(\w+)", TEXT)
    assert paths
    assert targets
    assert layers
    assert places
    absent = [path for path in paths if not (ROOT / path).exists()]
    absent += [target for target in targets if f".PHONY: {target}\n" not in makefile]
    layers = [f"torchrl_sglang/{layer}/__init__.py" for layer in layers]
    absent += [file for file in layers if not (ROOT / file).is_file()]
    problems = [row for place in places for row in problems_of(PACKAGE, *place)]
    assert absent + problems == []

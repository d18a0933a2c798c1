"""The package's words: summary lines and local names, as CONTRIBUTING.md asks."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torchrl_sglang

ROOT = Path(torchrl_sglang.__file__).parent


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Returns the syntax tree of each file of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


RIDDLES = re.compile(r"(?i)\b(what|told|those of|that of|whoever|whichever)\b")
"""A summary line names the noun instead: it is read in lists of search results."""

VAGUE_NAMES = re.compile(
    "after|asked|before|began|behind|due|each|ended|far|found|given|had|here|it|kept|"
    "known|last|least|left|like|meant|mine|more|most|near|ones|others|ours|own|reached|"
    "rest|said|same|sent|so|taken|theirs|them|then|there|they|told|wanted|what|which|"
    "whole|why"
)
"""Participles, pronouns and adverbs; a local name is the noun of what it holds."""

NAMES_LEFT: dict[str, int] = {
    "backends": 9,
    "cli": 1,
    "collectors": 7,
    "gateway": 3,
    "policies": 1,
    "recording": 3,
    "requests": 1,
    "types.py": 1,
    "viewer": 4,
}
"""Number of such fields in each folder, which other files read; it only shrinks."""


def _place(path: Path, node: ast.AST, text: str) -> str:
    return f"{path}:{getattr(node, 'lineno', 1)}: {text}"


def _riddles() -> Iterator[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                summary = (ast.get_docstring(node) or "").split("\n")[0]
                if RIDDLES.search(summary):
                    yield _place(path, node, summary)


def _vague_names() -> dict[str, list[str]]:
    places = collections.defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Name(name, ast.Store()) if VAGUE_NAMES.fullmatch(name):
                    folder = path.relative_to(ROOT).parts[0]
                    places[folder].append(_place(path, node, name))
    return places


def test_summary_lines_name_their_nouns() -> None:
    riddles = list(_riddles())
    assert not riddles, "\n".join(riddles)


def test_local_names_are_nouns() -> None:
    for folder, places in _vague_names().items():
        limit = NAMES_LEFT.get(folder, 0)
        reason = f"{folder} has {len(places)}, allowed are {limit}:"
        assert len(places) <= limit, "\n".join([reason, *places])

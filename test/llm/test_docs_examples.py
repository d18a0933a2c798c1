"""Every example of the documentation runs, against the real engine.

That is the docstrings of the package, the pages in ``docs/source`` and the README. An
example may use the public names without importing them, and those in ``FIXTURES``
without making them.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path

import openai
import pytest

import torchrl_sglang

ROOT = Path(__file__).parents[2]

FIXTURES = {
    "engine": "engine",
    "model": "hf_model",
    "tiny_model_path": "tiny_model_path",
    "tokenizer": "tokenizer",
}
"""Free name in an example -> the fixture that provides it."""

NOT_IMPORTED_HERE = runpy.run_path(str(ROOT / ".ci" / "smoke.py"))["RUN_BY_OTHERS"]

MADE_BY_SPHINX = {"generated", "tutorials"}
"""Folders of pages that the build writes."""

PUBLIC_NAMES = sorted(set(torchrl_sglang.__all__) - {"__version__"})


def find_docstring_examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    for found in pkgutil.walk_packages(torchrl_sglang.__path__, "torchrl_sglang."):
        if found.name not in NOT_IMPORTED_HERE:
            module = importlib.import_module(found.name)
            yield from (test for test in finder.find(module) if test.examples)


def find_page_examples() -> Iterator[doctest.DocTest]:
    parser = doctest.DocTestParser()
    source = ROOT / "docs" / "source"
    for page in sorted(source.rglob("*.rst")):
        if MADE_BY_SPHINX & set(page.relative_to(source).parts):
            continue
        name = str(page.relative_to(ROOT))
        test = parser.get_doctest(page.read_text(), {}, name, str(page), 0)
        if test.examples:
            yield test


def find_free_names(source: str) -> set[str]:
    """Return the names that some source code uses and does not itself give a value."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - stored


def close_clients(names: Mapping[str, object]) -> None:
    """Closes what ends with a user's program, and is garbage of a test."""
    for value in names.values():
        if isinstance(value, openai.OpenAI):
            value.close()


def test_every_public_name_has_an_example() -> None:
    docstrings = {name: getattr(torchrl_sglang, name).__doc__ for name in PUBLIC_NAMES}
    assert [n for n, text in docstrings.items() if ">>> " not in (text or "")] == []


@pytest.mark.parametrize(
    "example",
    [*find_docstring_examples(), *find_page_examples()],
    ids=lambda example: example.name.removeprefix("torchrl_sglang."),
)
def test_example(example: doctest.DocTest, request: pytest.FixtureRequest) -> None:
    free_names = find_free_names("".join(part.source for part in example.examples))
    for name in free_names.intersection(PUBLIC_NAMES):
        example.globs[name] = getattr(torchrl_sglang, name)
    for name in free_names.intersection(FIXTURES):
        example.globs[name] = request.getfixturevalue(FIXTURES[name])
    report: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    failed = runner.run(example, out=report.append, clear_globs=False).failed
    close_clients(example.globs)
    example.globs.clear()
    if failed:
        pytest.fail("".join(report), pytrace=False)


def test_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": "readme"}
    exec(compile("\n".join(blocks), "README.md", "exec"), names)
    close_clients(names)

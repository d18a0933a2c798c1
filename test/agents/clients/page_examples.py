"""Reads the examples of the guide on frameworks, with the standard library only."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/source/guides/agent_frameworks.rst"
_BLOCK = re.compile(
    r"^\.\. code-block:: python\n\n(.*?)(?=^\S)", re.DOTALL | re.MULTILINE
)


def read_example(section: str) -> str:
    """Returns the first example of a section."""
    _, _, text = PAGE.read_text().partition(f"\n{section}\n{'-' * len(section)}\n")
    found = _BLOCK.search(text)
    assert found, section
    return textwrap.dedent(found[1])

"""Text templates with a task's values in braces: ``"Fix {issue}"``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import nearest

_NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
"""``{{name}}`` is ``{name}`` itself; braces around anything else are kept: JSON and
TOML need no escapes."""

TASK = "task"
"""Name of a task other than a mapping."""


def task_values(task: Any) -> Mapping[str, Any]:
    """Returns the values of a task for placeholders.

    Examples:
        >>> task_values("Add a test.")
        {'task': 'Add a test.'}
    """
    return task if isinstance(task, Mapping) else {TASK: task}


def fill(kind: str, text: str, values: Mapping[str, Any]) -> str:
    """Fills the values into a text.

    Examples:
        >>> fill("An argument", 'Fix {issue}, {"json": {}}', {"issue": 3})
        'Fix 3, {"json": {}}'
    """

    def value_of(match: re.Match[str]) -> str:
        itself, name = match.groups()
        if itself is not None:
            return f"{{{itself}}}"
        if name not in values:
            guess = nearest(name, map(str, values))
            hint = "" if guess is None else f" Did you mean {{{guess}}}?"
            raise ConfigurationError(
                f"{kind} names {{{name}}}, which is no value of the task; there are "
                f"{', '.join(map(str, values))}.{hint} Write {{{{{name}}}}} for the "
                f"text itself."
            )
        value = values[name]
        if not isinstance(value, (str, int, float)):
            raise ConfigurationError(
                f"{kind} names {{{name}}}, which is a {type(value).__name__}; only "
                f"texts and numbers can be named."
            )
        return str(value)

    filled = _NAME.sub(value_of, text)
    try:
        os.fsencode(filled)
    except UnicodeEncodeError as error:
        half = filled[error.start : error.end]
        raise ConfigurationError(
            f"{kind} has {half!r} in {filled[max(error.start - 20, 0) : error.end]!r}: "
            f"half of a character, which cannot be written; a text was cut within it."
        ) from error
    return filled

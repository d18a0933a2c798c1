"""Content of a message: a text, or parts with texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.errors import ConfigurationError

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Type of a part -> field with its text."""


def text_of(content: Any, name: str) -> str:
    """Returns a message's content as a text: of a text, a part, parts or nothing.

    ``name`` is the message's, for errors.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ConfigurationError(f"{name}.content must be a text or a list of parts.")
    return "".join(_text_of_part(part, name) for part in content)


def _text_of_part(part: Any, name: str) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise ConfigurationError(
            f"{name} has {part!r:.50} as a part of its content, and a part has a "
            f"type, as {{'type': 'text', 'text': ...}}; give a text or such parts."
        )
    kind = part["type"]
    field = TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ConfigurationError(
            f"{name} has a part of type {kind!r}; the policy takes text only, no "
            f"images, audio or files."
        )
    if field not in part:
        raise ConfigurationError(
            f"{name} has a part of type {kind!r} without {field!r}; it has "
            f"{', '.join(map(str, part))}."
        )
    text = part[field]
    if not isinstance(text, (str, type(None))):
        raise ConfigurationError(
            f"{name} has a part of type {kind!r} whose {field} is {text!r:.50}, and no "
            f"text."
        )
    return text or ""

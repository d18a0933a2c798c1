"""Parts of a message's content: texts, and later other modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """A text."""

    text: str
    """Text as the model reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePart:
    """An image, which no policy reads yet: :func:`text_of` refuses it."""

    kind: str
    """Type of the part, in the client's words."""
    source: Any
    """Address of the image or its data, as the client sent it."""


Part: TypeAlias = TextPart | ImagePart


TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Type of a part -> field with its text."""

IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "source"}
"""Type of a part -> field with its image: OpenAI's two, and Anthropic's."""


def parts_of(content: Any, name: str) -> list[Part]:
    """Returns the parts of a message's content, which is a text, parts or nothing."""
    if content is None or isinstance(content, str):
        return [TextPart(text=content)] if content else []
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ConfigurationError(f"{name}.content must be a text or a list of parts.")
    return [_part(part, name) for part in content]


def _part(given: Any, name: str) -> Part:
    if not isinstance(given, Mapping) or "type" not in given:
        raise ConfigurationError(
            f"{name} has {given!r:.50} as a part of its content, and a part has a "
            f"type, as {{'type': 'text', 'text': ...}}; give a text or such parts."
        )
    kind = given["type"]
    if isinstance(kind, str) and kind in TEXTS:
        if TEXTS[kind] not in given:
            raise ConfigurationError(
                f"{name} has a part of type {kind!r} without {TEXTS[kind]!r}; it has "
                f"{', '.join(map(str, given))}."
            )
        text = given[TEXTS[kind]]
        if not isinstance(text, (str, type(None))):
            raise ConfigurationError(
                f"{name} has a part of type {kind!r} whose {TEXTS[kind]} is "
                f"{text!r:.50}, and no text."
            )
        return TextPart(text=text or "")
    if isinstance(kind, str) and kind in IMAGES:
        return ImagePart(kind=kind, source=given.get(IMAGES[kind]))
    raise _refusal(kind, name)


def text_of(content: Any, name: str) -> str:
    """Returns a message's content as a text; see :func:`parts_of`."""
    texts = []
    for part in parts_of(content, name):
        if not isinstance(part, TextPart):
            raise _refusal(part.kind, name)
        texts.append(part.text)
    return "".join(texts)


def _refusal(kind: Any, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} has a part of type {kind!r}; the policy takes text only, no images, "
        f"audio or files."
    )

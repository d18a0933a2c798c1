"""Parts of a message: what is read, what is refused, and that every door does so."""

from __future__ import annotations

import pytest

from torchrl_sglang.chat.content import text_of
from torchrl_sglang.chat.messages import from_openai, read_messages
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects import anthropic
from torchrl_sglang.gateway.dialects.openai import read_chat

TEXT = {"type": "text", "text": "Look: "}
IMAGES = {
    "image_url": {"type": "image_url", "image_url": {"url": "data:,"}},
    "input_image": {"type": "input_image", "image_url": "data:,"},
    "image": {"type": "image", "source": {"type": "url", "url": "data:,"}},
}


def message(*parts):
    return {"role": "user", "content": list(parts)}


DOORS = {
    "chat": lambda said: from_openai([said]),
    "OpenAI": lambda said: read_chat({"messages": [said]}).messages,
    "Anthropic": lambda said: (
        anthropic.read_messages({"messages": [said], "max_tokens": 1}).messages
    ),
    "functions": lambda said: read_messages(said, "step"),
}
doors = pytest.mark.parametrize("door", DOORS)


def test_texts():
    assert text_of("", "m") == text_of(None, "m") == text_of([], "m") == ""
    assert text_of("a", "m") == "a"
    assert text_of([TEXT, {"type": "refusal", "refusal": "No."}], "m") == "Look: No."


@doors
def test_texts_are_joined(door):
    (found,) = DOORS[door](message(TEXT, {"type": "text", "text": "here"}))
    assert found == {"role": "user", "content": "Look: here"}


@doors
def test_a_text_that_is_none(door):
    """A model does not read the word "None"."""
    (found,) = DOORS[door](message(TEXT, {"type": "text", "text": None}))
    assert found == {"role": "user", "content": "Look: "}
    with pytest.raises(ConfigurationError, match=r"'text' whose text is 5, and no"):
        DOORS[door](message({"type": "text", "text": 5}))


def test_arguments_that_are_too_deep_are_kept_as_they_are():
    deep = "[" * 100_000
    call = {"id": "1", "function": {"name": "add", "arguments": deep}}
    (found,) = from_openai([{"role": "assistant", "tool_calls": [call]}])
    assert found["tool_calls"][0]["function"]["arguments"] == deep


@doors
@pytest.mark.parametrize("kind", [*IMAGES, "audio", None, 3])
def test_content_without_text_is_refused(door, kind):
    part = IMAGES.get(kind, {"type": kind})
    with pytest.raises(ConfigurationError, match=f"type {kind!r}.*text only"):
        DOORS[door](message(TEXT, part))

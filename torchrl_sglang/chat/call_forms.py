"""``CallForm``: the form of a message's tool calls for a chat template.

Some templates join the arguments to a text and fail on objects, some render the calls
only if the content is none, and some accept only ids of nine letters and digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.errors import ConfigurationError

_ID_LENGTH = 9
_PROBE = "probevalue"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """A form of messages with tool calls."""

    texts: bool = False
    """Arguments are texts of JSON instead of objects."""
    no_content: bool = False
    """An empty content beside calls is none instead of an empty text."""
    short_ids: bool = False
    """Ids have nine letters and digits."""

    def write(self, message: Message) -> dict[str, Any]:
        """Returns a message in this form."""
        written = dict(message)
        if "tool_call_id" in message:
            written["tool_call_id"] = self.write_id(message["tool_call_id"])
        if message.get("tool_calls"):
            written["tool_calls"] = [self._call(c) for c in message["tool_calls"]]
            if self.no_content and not written["content"].strip():
                written["content"] = None
        return written

    def write_id(self, given: Any) -> str:
        """Returns the id of a call in this form; equal ids stay equal."""
        name = str(given)
        if not self.short_ids or (len(name) == _ID_LENGTH and name.isalnum()):
            return name
        return hashlib.blake2b(name.encode()).hexdigest()[:_ID_LENGTH]

    def _call(self, call: Any) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.texts and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        return {**call, "id": self.write_id(call.get("id", "")), "function": function}


def find_form(render: Callable[[Sequence[Message]], str]) -> CallForm:
    """Returns the form of tool calls in a template.

    Between an empty content and none, the shorter text wins: some templates render an
    empty message beside the calls.
    """
    for short_ids, texts in product((False, True), repeat=2):
        lengths = {}
        for no_content in (False, True):
            form = CallForm(texts=texts, no_content=no_content, short_ids=short_ids)
            try:
                text = render([form.write(message) for message in _conversation()])
            except ConfigurationError:
                continue
            # A model does not write doubly quoted texts.
            if _PROBE in text and f'{_PROBE}\\"' not in text:
                lengths[form] = len(text)
        if lengths:
            return min(lengths, key=lambda form: lengths[form])
    return CallForm()


def _conversation() -> list[Message]:
    function = {"name": "probe", "arguments": {"key": _PROBE}}
    call = {"id": "call_0123456789", "type": "function", "function": function}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "probe", "tool_call_id": call["id"]},
    ]

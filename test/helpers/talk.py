"""A session whose model writes what a test says, with the template of a family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.chat_families import (
    FAMILIES,
    family_tokenizer,
    render_as_transformers,
)
from torchrl_sglang.chat.messages import without_stop
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.types import Completion

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": PARAMETERS},
}
TOOLS = PromptSettings(tools=[TOOL])
ARGUMENTS = {"city": 'Zürich <"a" & \\b>', "days": 2, "hours": [1.5, None, True]}


class Talk:
    """A session whose model writes what the test says, and which checks each prompt."""

    def __init__(self, name: str, setting: PromptSettings | None = None) -> None:
        self.family = FAMILIES[name]
        self.tokenizer = family_tokenizer(name)
        self.template = ChatTemplate(self.tokenizer)
        self.session = Session(name)
        self.setting = setting or PromptSettings()
        self.strict = True

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str = "fine",
        reply: Mapping[str, Any] | None = None,
        *,
        end: str | None = "",
        stop: str | None = None,
    ) -> Turn:
        """Returns the turn in which the model wrote a text; ``end``: the family's."""
        prompt = self.session.prompt(messages, self.setting, self.template)
        end = self.family.end if end == "" else end
        ids = self.template.encode_behind(text)
        if end is not None:
            ids += self.template.encode(end)
        text = self.template.decode(ids[: len(ids) - (end is not None)])
        said = {"role": "assistant", "content": without_stop(text, stop)}
        turn = Turn(
            number=len(self.session.turns),
            prompt=prompt,
            completion=Completion(
                token_ids=ids,
                finish_reason="length" if end is stop is None else "stop",
                matched_stop=stop,
            ),
            text=text,
            reply={**said, **(reply or {})},
            ended=end is not None,
        )
        self.session.add(turn)
        self.check(prompt)
        return turn

    def outcome(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns what becomes of the next turn."""
        try:
            turn = self.ask(messages)
        except ConfigurationError:
            return "refused"
        parent = turn.prompt.parent
        return "root" if parent is None else f"joins {parent}"

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns what transformers renders."""
        return render_as_transformers(
            self.tokenizer,
            [self._fit(message) for message in messages],
            list(self.setting.tools) or None,
            **self.setting.template_kwargs,
        )

    def _fit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not (self.family.texts and message.get("tool_calls")):
            return dict(message)
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(
                        call["function"]["arguments"], ensure_ascii=False
                    ),
                },
            }
            for call in message["tool_calls"]
        ]
        content = message["content"] if message["content"].strip() else None
        return {**message, "content": content, "tool_calls": calls}

    def check(self, prompt: Prompt) -> None:
        """Checks a prompt against transformers' rendering of its conversation."""
        rendered = self.render(prompt.messages)
        if prompt.parent is None:
            assert prompt.token_ids == self.tokenizer.encode(
                rendered, add_special_tokens=False
            )
            return
        parent = self.session.turns[prompt.parent]
        known = len(parent.token_ids)
        assert prompt.token_ids[:known] == parent.token_ids
        before = self.render(parent.prompt.messages)
        between = self.template.decode(prompt.token_ids[known:])
        assert rendered.startswith(before)
        if self.family.pieces:
            # SentencePiece writes spaces so.
            rendered, before = (x.replace("\u2581", " ") for x in (rendered, before))
        assert rendered.endswith(between)
        assert [
            *parent.prompt.messages,
            prompt.said or parent.reply,
        ] == prompt.messages[: len(parent.prompt.messages) + 1]
        if prompt.said is not None:
            written = self.template.decode(parent.completion.token_ids)
            own = rendered[len(before) : len(rendered) - len(between)]
            assert "".join(own.split()) == "".join(written.split())
        elif self.strict:
            self._check_reply(
                rendered[len(before) : len(rendered) - len(between)], parent
            )

    def _check_reply(self, written: str, turn: Turn) -> None:
        """Checks that the template writes all of a response where the model's is."""
        said = turn.reply
        if not said.get("tool_calls") and not said.get("reasoning_content"):
            expected = said["content"].strip()
            if turn.ended:
                written = written.removesuffix(self.family.end)
            assert written.strip() == expected
            return
        assert said["content"].strip() in written
        assert said.get("reasoning_content", "").strip() in written
        for call in said.get("tool_calls", ()):
            found = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            assert call["function"]["name"] in written
            assert found in written


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments or ARGUMENTS}
    return {"id": f"callid{number:03}", "type": "function", "function": function}


def result(number: int, text: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"callid{number:03}"}

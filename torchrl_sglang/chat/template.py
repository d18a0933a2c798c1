"""Chat templates, and how a conversation goes on by tokens.

What a model wrote stays as it wrote it: a later turn's prompt is the tokens of the
earlier prompt, the tokens of the response, and the tokenized text that the template
puts behind them. Whether a template can be extended so is found out for each turn, by
comparing what it renders: once, and once more where it renders the response in other
words than the model's, such as another order of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.chat.call_forms import CallForm, find_form
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.rendered import Response, after_marks, after_text, marked
from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a prompt depends on besides its messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Declarations of the tools, in OpenAI's form."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking``."""

    def key(self) -> list[Any]:
        """Returns what is compared of it."""
        return [list(self.tools), dict(self.template_kwargs)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """What goes on from a response up to the next one."""

    token_ids: list[int]
    """Tokens behind the response's own."""
    rendered: str
    """The whole conversation as the template renders it."""


class ChatTemplate:
    """Renders conversations for one model.

    Args:
        tokenizer: of the model.
        template: a Jinja template. Defaults to the tokenizer's own.

    Raises:
        ConfigurationError: if there is none.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        try:
            # As a test whether there is one, too: tokenizers can have several.
            self._template = template or tokenizer.get_chat_template()
        except (AttributeError, ValueError) as error:
            raise ConfigurationError(
                "The tokenizer has no chat template; pass chat_template=... ."
            ) from error

        self._special = _special_tokens(tokenizer)
        self._anchors = (
            getattr(tokenizer, "bos_token", None),
            getattr(tokenizer, "eos_token", None),
        )
        self._found_form: CallForm | None = None

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, whose special tokens are written out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_start(self, text: str) -> list[int]:
        """Returns the tokens of a text without a template, as the server finds them.

        A token that begins texts is put before it unless it is written out.
        """
        ids = self.encode(text)
        first = self._tokenizer.encode("")[:1]
        begins = first == [getattr(self._tokenizer, "bos_token_id", None)]
        return [*first, *ids] if begins and ids[:1] != first else ids

    def encode_behind(self, text: str, end: str | None = None) -> list[int]:
        """Returns the tokens of a text that is not the first of its sequence.

        Args:
            text: to encode.
            end: the token before it, if it is known.
        """
        # Some tokenizers put a space before a first text, and some drop white space
        # behind a special token: here they see one before it.
        for name in (end, *self._anchors):
            if name in self._special:
                first, *ids = self.encode(name + text)
                if first == self._special[name]:
                    return ids
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Returns the text of tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not special,
            clean_up_tokenization_spaces=False,
        )
        return text

    def render(
        self, messages: Sequence[Message], setting: Setting, *, prompt: bool = True
    ) -> str:
        """Returns a conversation as text; ``prompt``: up to the assistant's turn.

        Raises:
            ConfigurationError: if the template does not take the conversation.
        """
        if any("tool_calls" in message for message in messages):
            messages = [self._form.write(message) for message in messages]
        return self._render(messages, setting, prompt=prompt)

    @property
    def _form(self) -> CallForm:
        if self._found_form is None:
            self._found_form = find_form(lambda probe: self._render(probe, Setting()))
        return self._found_form

    def _render(
        self, messages: Sequence[Message], setting: Setting, *, prompt: bool = True
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in setting.tools] or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                **setting.template_kwargs,
            )
        except Exception as error:
            # Templates raise arbitrary errors, for example on the order of roles.
            raise ConfigurationError(
                f"The chat template refuses this conversation: "
                f"{type(error).__name__}: {error}"
            ) from error
        return text

    def extend(
        self,
        rendered: str,
        before: Sequence[Message],
        response: Response,
        after: Sequence[Message],
        setting: Setting,
    ) -> Extension | None:
        """Returns what a model reads between its response and its next one.

        Args:
            rendered: ``before`` as :meth:`render` returns it.
            before: messages that the response was an answer to.
            response: of the model.
            after: messages since.
            setting: of all of them.

        Returns:
            ``None`` if the template renders the earlier conversation in another way
            now, or not what the model wrote.
        """

        def body(
            reply: Message, others: Sequence[Message] = after, *, prompt: bool = True
        ) -> str:
            whole = self.render([*before, reply, *others], setting, prompt=prompt)
            if not whole.startswith(rendered):
                raise ConfigurationError("The earlier conversation is rendered anew.")
            return whole[len(rendered) :]

        try:
            now = body(response.message)
            rest = self._rest(now, response, body)
        except ConfigurationError:
            return None
        if rest is None:
            return None
        ids = self.encode_behind(rest, response.end)
        return Extension(token_ids=ids, rendered=rendered + now)

    def _rest(
        self, now: str, response: Response, body: Callable[..., str]
    ) -> str | None:
        """Returns what the template writes behind a response and its end."""
        # A token that a request chose as an end is none to the template.
        end = response.end if response.end in self._special else None
        rest = after_text(now, response.text)
        if end is None:
            # If it is None, where the response ends in other words is not known.
            return rest
        if rest is not None:
            return self._behind_end(rest.lstrip(), end, response, body)
        reply, marks = marked(response.message)
        if not marks:
            return None
        calls = response.message.get("tool_calls", ())
        ids = [self._form.write_id(call.get("id", "")) for call in calls]
        return after_marks(now, body(reply), marks, response, ids)

    def _behind_end(
        self, rest: str, end: str, response: Response, body: Callable[..., str]
    ) -> str | None:
        """Returns what is behind a response's end, which the template's stands for."""
        if rest.startswith(end):
            return rest[len(end) :]
        other = next((token for token in self._special if rest.startswith(token)), None)
        if other is None:
            return None
        # Where a template writes no end, the token begins the next message.
        closed = body(response.message, (), prompt=False).rstrip().endswith(other)
        return rest[len(other) :] if closed else None


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {str(t): i for i, t in added.items() if t.special} | dict(named)

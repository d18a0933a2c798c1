"""Chat templates, and the continuation of conversations by tokens.

A model's tokens are kept unchanged: a later turn's prompt consists of the tokens of the
earlier prompt, the tokens of the response, and the tokenized text of the template after
them. Each turn tests whether a template can be extended like this, by comparing
renderings: once, and again if it renders the response in other words than the model's,
such as another order of arguments.

:meth:`ChatTemplate.extend` is for callers with the turns of a conversation, and
:meth:`ChatTemplate.go_on` for callers with its tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jinja2 import Environment, Template, TemplateSyntaxError

from torchrl_sglang.chat.call_forms import CallForm, find_form
from torchrl_sglang.chat.choose import choose_template
from torchrl_sglang.chat.environment import (
    MARKER,
    RESERVED,
    as_read,
    marking_template,
    quick_template,
)
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.prompt_settings import NO_PROMPT_SETTINGS, PromptSettings
from torchrl_sglang.chat.rendered import (
    ChatResponse,
    after_marks,
    after_text,
    keeps,
    marked,
)
from torchrl_sglang.chat.tokens import Encoder
from torchrl_sglang.errors import ChatTemplateError, ConfigurationError
from torchrl_sglang.support.checks import check_mapping

_RESPONSE = "Response"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """Tokens and text between two responses."""

    token_ids: list[int]
    """Tokens after the response's own."""
    rendered: str
    """The whole rendered conversation."""


class ChatTemplate(Encoder):
    """Renders conversations for a model.

    Args:
        tokenizer: the model's.
        template: a Jinja template. Defaults to the tokenizer's own.
        template_kwargs: default variables of the template, such as ``enable_thinking``;
            a prompt's settings override them.

    Attributes:
        source (str): source of the template.

    Raises:
        ConfigurationError: if there is none, or it lacks such a variable.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.source = choose_template(tokenizer, template=template)
        kwargs = check_mapping("chat_template_kwargs", template_kwargs or {})
        self.template_kwargs = dict(kwargs)
        for name in self.template_kwargs:
            if name in RESERVED or name not in self.variables:
                raise ConfigurationError(
                    f"chat_template_kwargs has {name!r}, which is no variable of the "
                    f"chat template; leave it out, or give another chat_template."
                )

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names in the template's code, its variables among them."""
        # A lexer accepts tags defined only by transformers.
        tokens = Environment(autoescape=False).lex(self.source)
        try:
            return frozenset(text for _, kind, text in tokens if kind == "name")
        except TemplateSyntaxError as error:
            raise ConfigurationError(
                f"The chat template is not one of Jinja's: {error}."
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        setting: PromptSettings = NO_PROMPT_SETTINGS,
        *,
        prompt: bool = True,
    ) -> str:
        """Returns a conversation as text; ``prompt``: up to the assistant's turn."""
        return self._render(self.in_form(messages), setting, prompt=prompt)

    def in_form(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages in the template's form of tool calls."""
        if any("tool_calls" in message for message in messages):
            return [self.call_form.write(message) for message in messages]
        return list(messages)

    def render_marked(
        self, messages: Sequence[Message], mark: Callable[..., str], *, prompt: bool
    ) -> str:
        """Returns :meth:`render` with marks, see :func:`.marking_template`.

        Args:
            messages: messages from :meth:`in_form`.
            mark: called with the number of a loop over messages, and the position of a
                message, or ``None`` after the loop.
            prompt: up to the assistant's turn.
        """
        read = as_read([dict(message) for message in messages])
        places = {id(message): index for index, message in enumerate(read)}
        running: set[int] = set()

        def mark_each(loop: int, *values: Any) -> str:
            # The output of loops over other values may be trimmed or measured.
            place = next((places[id(v)] for v in values if id(v) in places), None)
            if place is not None:
                running.add(loop)
            elif values or loop not in running:
                return ""
            else:
                running.remove(loop)
            return mark(loop, place)

        variables = {**self._variables(read, prompt=prompt), MARKER: mark_each}
        try:
            return self._marking.render(**variables)
        except Exception as error:
            raise _refusal(error) from error

    @cached_property
    def _marking(self) -> Template:
        return marking_template(self.tokenizer, self.source)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The template's special token after a response, if any."""
        chat = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _RESPONSE},
        ]
        try:
            text = self._render(chat, NO_PROMPT_SETTINGS, prompt=False)
        except ConfigurationError:
            return frozenset()
        ending = text.rpartition(_RESPONSE)[2].lstrip()
        return frozenset(
            token_id
            for token, token_id in self.special.items()
            if ending.startswith(token)
        )

    @cached_property
    def _quick(self) -> Template | None:
        return quick_template(self.tokenizer, self.source)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code cannot be pickled.
        compiled = ("_quick", "_marking")
        return {n: value for n, value in vars(self).items() if n not in compiled}

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template takes tool calls."""
        return find_form(lambda probe: self._render(probe, NO_PROMPT_SETTINGS))

    def _render(
        self,
        messages: Sequence[Message],
        setting: PromptSettings,
        *,
        prompt: bool = True,
    ) -> str:
        chat = [dict(message) for message in messages]
        variables = {**self.template_kwargs, **setting.template_kwargs}
        try:
            if self._quick is not None and RESERVED.isdisjoint(variables) and chat:
                return self._quick.render(
                    **self._variables(as_read(chat), setting, prompt=prompt)
                )
            text: str = self.tokenizer.apply_chat_template(
                chat,
                tools=[dict(tool) for tool in setting.tools] or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
                **variables,
            )
        except Exception as error:
            # Templates raise arbitrary errors, for example on the order of roles.
            raise _refusal(error) from error
        return text

    def _variables(
        self,
        messages: Sequence[Message],
        setting: PromptSettings = NO_PROMPT_SETTINGS,
        *,
        prompt: bool,
    ) -> dict[str, Any]:
        """Returns the variables of the template, as transformers sets them."""
        return {
            **self.tokenizer.special_tokens_map,
            **self.template_kwargs,
            **setting.template_kwargs,
            "messages": messages,
            "tools": list(setting.tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def extend(
        self,
        rendered: str,
        before: Sequence[Message],
        response: ChatResponse,
        after: Sequence[Message],
        setting: PromptSettings,
        *,
        literal: bool = False,
    ) -> Extension | None:
        """Returns the text and tokens between two responses.

        Args:
            rendered: ``before``, rendered by :meth:`render`.
            before: messages before the response.
            response: the model's.
            after: messages after the response.
            setting: settings of all of them.
            literal: only if the template renders the response's exact text, white space
                ignored. Its message may then come from anywhere.

        Returns:
            ``None`` if the template now renders the earlier conversation, or the
            model's response, differently.
        """

        def body(
            reply: Message, others: Sequence[Message] = after, *, prompt: bool = True
        ) -> str:
            full_text = self.render([*before, reply, *others], setting, prompt=prompt)
            if not full_text.startswith(rendered):
                raise ConfigurationError("The earlier conversation is rendered anew.")
            return full_text[len(rendered) :]

        try:
            now = body(response.message)
            ending = self._rest(now, response, body, literal=literal)
        except ConfigurationError:
            return None
        if ending is None:
            return None
        ids = self.encode_behind(ending, response.end)
        return Extension(token_ids=ids, rendered=rendered + now)

    def go_on(
        self, text: str, messages: Sequence[Message], known: Sequence[int]
    ) -> list[int] | None:
        """Returns the tokens of a conversation with known first tokens.

        Args:
            text: ``messages``, rendered by :meth:`render`.
            messages: the conversation.
            known: tokens of its begin, such as an earlier prompt and response.

        Returns:
            ``None`` if the conversation begins differently, or known tokens have no
            text.
        """

        def closed() -> str:
            spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            return (
                self.render(messages[: spoken[-1] + 1], prompt=False) if spoken else ""
            )

        written, end = self.decode(known), self.decode(known[-1:])
        if end not in self.special:
            end = ""
        begin = written.removesuffix(end)
        if not begin.strip():
            return None
        ending = after_text(text, begin)
        if ending is None:
            ending = after_text(text, self._with_ends(begin, known, text))
        if end and ending is not None:
            try:
                ending = self._behind_end(ending.lstrip(), end, closed)
            except ConfigurationError:
                return None
        if ending is None or not keeps(messages, text.removesuffix(ending), written):
            return None
        return [*known, *self.encode_behind(ending, end)]

    def _with_ends(self, written: str, known: Sequence[int], text: str) -> str:
        """Returns the text of known tokens, with other ends replaced by the template's.

        ``text``: the rendered conversation; an end in it belongs to a message.
        """
        foreign = set(known) - self.end_ids
        ends = [token for token, i in self.special.items() if i in self.end_ids]
        for end in ends:
            for other in (token for token, i in self.special.items() if i in foreign):
                if other not in text:
                    written = written.replace(other, end)
        return written

    def _rest(
        self,
        now: str,
        response: ChatResponse,
        body: Callable[..., str],
        *,
        literal: bool,
    ) -> str | None:
        """Returns the template's text after a response and its end."""
        # A request's own end token is not an end of the template.
        end = response.end if response.end in self.special else None
        text = response.text
        if end is not None and self.special[end] not in self.end_ids:
            # The message has an end absent from the template.
            text = text.removesuffix(end)
        ending = after_text(now, text)
        if end is None:
            # If it is None, the end of a differently rendered response is unknown.
            return ending
        if ending is not None:
            closed = partial(body, response.message, (), prompt=False)
            return self._behind_end(ending.lstrip(), end, closed)
        if literal:
            return None
        calls = response.message.get("tool_calls", ())
        reply, marks = marked(response.message)
        if not marks:
            return None
        ids = [self.call_form.write_id(call.get("id", "")) for call in calls]
        return after_marks(now, body(reply), marks, response, ids)

    def _behind_end(self, rest: str, end: str, closed: Callable[[], str]) -> str | None:
        """Returns the text after a response's end or the template's end in its place.

        ``closed`` renders the conversation up to the response.
        """
        if rest.startswith(end):
            return rest[len(end) :]
        other = next((token for token in self.special if rest.startswith(token)), None)
        # If a template writes no end, the token begins the next message.
        if other is not None and closed().rstrip().endswith(other):
            return rest[len(other) :]
        return None


def _refusal(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(
        f"The chat template refuses this conversation: {type(error).__name__}: {error}"
    )

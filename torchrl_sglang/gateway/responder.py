"""Responder: from a client's request to recorded turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.messages import check_last_message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.keeping import Keeper, check_takes_turns
from torchrl_sglang.gateway.options import ServingOptions
from torchrl_sglang.gateway.policy import (
    Policy,
    PolicyReply,
    Sampling,
)
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.reading import RequestReader
from torchrl_sglang.gateway.registry import SessionRegistry
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.session import NEW_CHARACTERS, Session
from torchrl_sglang.gateway.tool_grammar import GRAMMARS, with_choice
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.support.tracing import span

PROMPT_THREADS = 2
"""Threads that render and tokenize long prompts; tokenizers leave Python meanwhile."""


class Responder:
    """Reads requests, generates responses, and keeps them.

    Args:
        engine: generates.
        options: of the gateway.
    """

    def __init__(self, engine: RLSGLangEngine, options: ServingOptions) -> None:
        self.dialects: Sequence[Dialect] = options.dialects
        self.open = options.open
        self.api_key = options.api_key
        self.keep_alive_seconds = options.keep_alive_seconds
        self.models = [engine.model_path]
        self._capabilities = engine.capabilities
        self._options, self._limits = options, options.limits
        self._template = ChatTemplate(options.tokenizer, options.chat_template)
        self._reader = RequestReader(
            ignored_params=options.ignored_params,
            tool_choice=options.tool_choice,
            variables=self._template.variables,
            forces_grammar=not GRAMMARS.isdisjoint(options.forced_sampling_params),
        )
        self._policy = Policy(
            engine,
            options.tokenizer,
            self._template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            token_columns=options.token_columns,
            logprobs_mode=options.logprobs_mode,
            timeout=options.request_timeout,
        )
        self._lock = threading.Lock()
        self._registry = SessionRegistry(self._lock)
        self._keeper = Keeper(self._lock)
        self._texts: dict[int, str] = {}
        self._threads = prompt_threads()

    # For the HTTP routes.

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns the session of this name or key.

        Raises:
            GatewayError: if there is none, or its key has expired.
        """
        return self._registry.find(name=name, key=key)

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Parses the body of a request. For the HTTP routes.

        Raises:
            ConfigurationError: for what is wrong or unsupported.
        """
        return self._reader(read, body)

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps the responses to a request. For the HTTP routes."""
        number = request.sampling.number
        check_takes_turns(session)
        self._check_limits(session, number)
        session.generating += number
        try:
            check_last_message(request.messages)
            prompt = await self._prompt(session, request)
            self._policy.check_fits(prompt)
            await self._keeper.writable()
            with span(
                "chat",
                kind="server",
                of=session,
                session=session.name,
                gen_ai__operation__name="chat",
                gen_ai__request__model=request.model,
            ):
                replies = await self._policy.respond(
                    prompt,
                    self._sampling(session, request, prompt),
                    session=session.name,
                    priority=session.priority,
                    progress=progress,
                )
            turns = [
                _to_turn(session.next_number(), prompt, reply, request)
                for reply in replies
            ]
            await self._keeper.keep(session, turns, new=len(turns))
        finally:
            session.generating -= number
        return turns

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Keeps turns again that were withdrawn. For the HTTP routes.

        Raises:
            GatewayError: if the session was dropped, or the file cannot be written.
                None of them is kept then.
        """
        await self._keeper.keep(session, turns)

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Removes turns that no client has seen. For the HTTP routes."""
        self._keeper.withdraw(session, turns)

    def received(self, session: Session, turns: Sequence[Turn]) -> None:
        """Knows that a client has turns. For the HTTP routes."""
        self._keeper.received(session, turns)

    async def unname(self, session: Session, turn: Turn) -> None:
        """Forgets the name of a turn's answer, also in the file. For the HTTP routes.

        Raises:
            GatewayError: if the file cannot be written.
        """
        await self._keeper.unname(session, turn)

    async def written(self) -> None:
        """Returns when everything so far is in the file. For the HTTP routes.

        Raises:
            GatewayError: if it could not be written.
        """
        await self._keeper.written()

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt. For the HTTP routes."""
        return (await self._prompt(session, request)).num_tokens

    def token_text(self, token: int) -> str:
        """Returns the text of a token. For the HTTP routes."""
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = self._template.decode([token])
        return text

    def _sampling(self, session: Session, request: Request, prompt: Prompt) -> Sampling:
        """Returns how the responses to a request are drawn."""
        options = self._options
        params = {**options.default_sampling_params, **request.sampling.params}
        if GRAMMARS.isdisjoint(options.forced_sampling_params):
            params = with_choice(
                params,
                request.setting.tools,
                request.choice,
                call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                prompt=prompt.rendered,
                has_grammar=self._capabilities.has_grammar,
            )
        params |= options.forced_sampling_params
        if self._limits.max_tokens is not None:
            tokens_left = self._limits.max_tokens - session.num_tokens
            tokens_left //= request.sampling.number
            max_new_tokens = params.get("max_new_tokens")
            params["max_new_tokens"] = min(
                max_new_tokens if isinstance(max_new_tokens, int) else tokens_left,
                max(tokens_left, 1),
            )
        return replace(request.sampling, params=params)

    async def _prompt(self, session: Session, request: Request) -> Prompt:
        """Returns a prompt; one that takes longer is made beside the event loop."""
        text, template = request.text, self._template
        if text is not None:
            if len(text) <= NEW_CHARACTERS:
                return session.text_prompt(text, template)
            return await self._apart(partial(session.text_prompt, text, template))
        arguments = request.messages, known_settings(request.setting), template
        prompt = session.next_prompt(*arguments)
        if prompt is not None:
            return prompt
        return await self._apart(partial(session.prompt, *arguments))

    async def _apart(self, make: Callable[[], Prompt]) -> Prompt:
        """Calls a function in a thread of the gateway's own."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def _check_limits(self, session: Session, number: int) -> None:
        turns = len(session.turns) + session.generating + number
        limits = self._limits
        is_reached = {
            f"max_turns={limits.max_turns}": turns > limits.max_turns,
            f"max_tokens={limits.max_tokens}": limits.max_tokens is not None
            and session.num_tokens >= limits.max_tokens,
            f"session_seconds={limits.session_seconds}": (
                limits.session_seconds is not None
                and session.age > limits.session_seconds
            ),
        }
        for limit, holds in is_reached.items():
            if holds:
                raise GatewayError(
                    f"The session {session.name!r} has reached {limit}, and takes no "
                    f"more turns."
                )


def prompt_threads() -> ThreadPoolExecutor:
    """Returns threads that render and tokenize; they start when they are needed."""
    return ThreadPoolExecutor(
        PROMPT_THREADS, thread_name_prefix="torchrl_sglang-prompts"
    )


def _to_turn(number: int, prompt: Prompt, reply: PolicyReply, request: Request) -> Turn:
    return Turn(
        number=number,
        prompt=prompt,
        completion=reply.completion,
        text=reply.text,
        reply=reply.message,
        ended=reply.ended,
        model=request.model,
        user=request.user,
        metadata=request.metadata,
        request_id=request.request_id,
        name=request.name if request.keep else "",
        answer_name=request.name,
        request_digest=request.digest,
        about=request.about if request.keep else {},
    )

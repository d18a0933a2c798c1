"""Responder: from a client's request to recorded turns."""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.messages import check_last_message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.keeping import Keeper, check_takes_turns
from torchrl_sglang.gateway.options import SessionLimits
from torchrl_sglang.gateway.policy import Policy, PolicyReply, Sampling
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.reading import RequestReader
from torchrl_sglang.gateway.registry import SessionRegistry
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.session import NEW_CHARACTERS, Session
from torchrl_sglang.gateway.tool_grammar import GRAMMARS, with_choice
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.tracing import span

PROMPT_THREADS = 2
"""Threads that render and tokenize long prompts; tokenizers leave Python meanwhile."""


class Responder(abc.ABC):
    """A gateway without its sessions: reads requests, generates and keeps responses."""

    api_key: str
    """Key to every session."""
    dialects: Sequence[Dialect]
    """Accepted dialects."""
    open: bool
    """Whether a session's path is sufficient for access."""
    sessionless: bool
    """Whether requests without a session are answered."""
    keep_alive_seconds: float
    """Interval between comments in a stream without content."""
    public_url: str | None
    """Address of the gateway for clients, if it differs from the request's."""
    token_columns: tuple[TokenColumn, ...]
    """Further recorded quantities of each token."""

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        template: ChatTemplate,
        policy: Policy,
        read: RequestReader,
        default_params: Mapping[str, Any],
        forced_params: Mapping[str, Any],
        limits: SessionLimits,
    ) -> None:
        self.engine = engine
        self.models = [engine.model_path]
        self.read = read
        self.token_text = cache(lambda token: template.decode([token]))
        self._template, self.policy = template, policy
        self.default_params, self._forced_params = default_params, forced_params
        self._limits = limits
        self._lock = threading.Lock()
        self._registry = SessionRegistry(self._lock)
        self.find = self._registry.find
        self.keeper = Keeper(self._lock)
        self._threads = prompt_threads()

    @abc.abstractmethod
    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns the session of this name, or a new session."""

    @abc.abstractmethod
    def drop(self, session: Session) -> None:
        """Drops a session."""

    @abc.abstractmethod
    def set_reward(
        self,
        session: Session,
        reward: float,
        *,
        turn: int | str | None = None,
        agent: str | None = None,
        branch: int | str | None = None,
    ) -> None:
        """Sets the reward of a session or of a part of it."""

    @abc.abstractmethod
    def set_metrics(self, session: Session, metrics: Mapping[str, float]) -> None:
        """Sets numbers of a session by name."""

    @abc.abstractmethod
    def discard(self, session: Session, agent: str) -> None:
        """Removes the turns of an agent."""

    @abc.abstractmethod
    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns the content type and the text of the metrics."""

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps the responses to a request."""
        if request.more_prompts:
            return await self._respond_each(session, request)
        number = request.sampling.number
        check_takes_turns(session)
        self._check_limits(session, number)
        session.generating += number
        try:
            check_last_message(request.messages)
            prompt = await self._prompt(session, request)
            self.policy.check_fits(prompt)
            await self.keeper.writable()
            with span(
                "chat",
                kind="server",
                of=session,
                session=session.name,
                gen_ai__operation__name="chat",
                gen_ai__request__model=request.model,
            ):
                replies = await self.policy.respond(
                    prompt,
                    self._sampling(session, request, prompt),
                    session=session.name or None,
                    request_id=request.request_id,
                    priority=session.priority,
                    progress=progress,
                )
            turns = [
                _to_turn(session.next_number(), prompt, reply, request)
                for reply in replies
            ]
            await self.keeper.keep(session, turns, new=len(turns))
        finally:
            session.generating -= number
        return turns

    async def _respond_each(self, session: Session, request: Request) -> list[Turn]:
        """Returns the responses to all prompts, in order; without any of them, none."""
        alone = replace(request, more_prompts=())
        requests = [alone] + [
            replace(alone, text=prompt, token_ids=None)
            if isinstance(prompt, str)
            else replace(alone, text=None, token_ids=prompt)
            for prompt in request.more_prompts
        ]
        tasks = [asyncio.ensure_future(self.respond(session, r)) for r in requests]
        try:
            parts = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            parts = [turns for turns in outcomes if isinstance(turns, list)]
            self.keeper.withdraw(session, list(chain.from_iterable(parts)))
            raise
        return list(chain.from_iterable(parts))

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt."""
        return (await self._prompt(session, request)).num_tokens

    def _sampling(self, session: Session, request: Request, prompt: Prompt) -> Sampling:
        """Returns how the responses to a request are drawn."""
        params = {**self.default_params, **request.sampling.params}
        if GRAMMARS.isdisjoint(self._forced_params):
            params = with_choice(
                params,
                request.setting.tools,
                request.choice,
                call_parser=self.policy.tool_call_parser,
                reasoning_parser=self.policy.reasoning_parser,
                prompt=prompt.rendered,
                has_grammar=self.engine.capabilities.has_grammar,
            )
        params |= self._forced_params
        if self._limits.max_tokens is not None:
            tokens_left = self._limits.max_tokens - session.num_tokens
            tokens_left //= request.sampling.number
            max_new_tokens = params.get("max_new_tokens")
            params["max_new_tokens"] = min(
                max_new_tokens if isinstance(max_new_tokens, int) else tokens_left,
                max(tokens_left, 1),
            )
        decodes = request.decodes or bool(session.name)
        return replace(request.sampling, params=params, decodes=decodes)

    async def _prompt(self, session: Session, request: Request) -> Prompt:
        """Returns a prompt; one that takes longer is made beside the event loop."""
        text, template = request.text, self._template
        if request.token_ids is not None:
            return session.token_prompt(request.token_ids, template)
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

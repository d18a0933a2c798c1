"""The owner's engine and the place where turns are kept, as a worker has them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.policy import PromptTokens
from torchrl_sglang.gateway.processes.channel import Channel
from torchrl_sglang.gateway.processes.messages import (
    Flush,
    Generate,
    KeepTurns,
    NewTokens,
    Parse,
    ReceivedTurns,
    SentPrompt,
    UnnameTurn,
    WithdrawTurns,
)
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import to_row
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.requests.request import GENERATE_TIMEOUT_SECONDS, GenerateRequest
from torchrl_sglang.types import Completion, ServerCapabilities

CALL_SECONDS = 120.0
"""Timeout of a call of the owner."""

GRACE_SECONDS = 30.0
"""Time for the owner to tell that the engine had no answer in time."""

UNKNOWN_TURN = "unknown_turn"
"""Code of the error for a prompt that begins with a turn which the owner has not."""

TOKEN_IDS = "i"
"""Type of arrays of tokens: integers of 32 bits."""


class RemoteParsers:
    """Parsers of the servers.

    Args:
        channel: to the owner.
        loop: that the channel is used from.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._loop = channel, asyncio.get_running_loop()

    async def parse_response(
        self, path: str, content: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns what a parser finds, see :class:`.ControlPlane`."""
        call = self._channel.call(
            Parse(path=path, content=content), seconds=CALL_SECONDS
        )
        # It is awaited on the engine's background loop.
        found: dict[str, Any] = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(call, self._loop)
        )
        return found


class RemoteEngine:
    """The owner's engine.

    Args:
        channel: to the owner.
        capabilities: of the engine.
        model_path: of the engine.
    """

    def __init__(
        self, channel: Channel, capabilities: ServerCapabilities, model_path: str
    ) -> None:
        self.capabilities, self.model_path = capabilities, model_path
        self.control = RemoteParsers(channel)
        self._channel = channel

    async def agenerate_requests(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """Returns the responses to requests, see :class:`.RLSGLangEngine`."""
        told: list[list[int]] = [[] for _ in requests]

        def take(part: NewTokens) -> None:
            known = told[part.index]
            told[part.index] = ids = [*known[: part.start], *part.token_ids]
            if (tell := requests[part.index].on_tokens) is not None:
                tell(ids)

        ask = Generate(
            requests=[replace(each, input_ids=(), on_tokens=None) for each in requests],
            prompts=_pack(requests, whole=False),
            live=any(each.on_tokens is not None for each in requests),
            timeout=timeout,
            request_timeout=request_timeout,
            return_exceptions=return_exceptions,
        )
        seconds = GENERATE_TIMEOUT_SECONDS if timeout is None else timeout
        call = partial(
            self._channel.call, seconds=seconds + GRACE_SECONDS, on_part=take
        )
        try:
            found: list[Completion] = await call(ask)
        except GatewayError as error:
            if error.code != UNKNOWN_TURN:
                raise
            # The turn that it goes on from was withdrawn meanwhile.
            found = await call(replace(ask, prompts=_pack(requests, whole=True)))
        return found


def _pack(requests: Sequence[GenerateRequest], *, whole: bool) -> list[SentPrompt]:
    """Returns the prompts of requests, without what the owner has, or as a whole."""
    packed: dict[int, SentPrompt] = {}
    for ids in (request.input_ids for request in requests):
        if id(ids) in packed:
            # Responses to one prompt share it.
            continue
        parent, new = None, ids
        if not whole and isinstance(ids, PromptTokens) and ids.parent is not None:
            parent, new = ids.parent, ids[len(ids) - ids.num_new :]
        packed[id(ids)] = SentPrompt(parent=parent, token_ids=array(TOKEN_IDS, new))
    return [packed[id(request.input_ids)] for request in requests]


class OwnerStore:
    """The owner's sessions and their file, where turns are kept.

    Args:
        channel: to the owner.
    """

    has_failed = False
    """The owner finds out before it generates."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def written(self) -> None:
        """Returns when everything so far is in the owner's file."""
        await self._channel.call(Flush(), seconds=CALL_SECONDS)

    async def save_turns(
        self, session: Session, turns: Sequence[Turn], *, new: int = 0
    ) -> None:
        """Returns when the owner has turns; the last ``new`` of them are counted."""
        rows = [to_row(turn) for turn in turns]
        await self._channel.call(
            KeepTurns(key=session.key, rows=rows, new=new), seconds=CALL_SECONDS
        )

    def delete_turns(self, session: Session, turns: Sequence[Turn]) -> None:
        """Has the owner remove turns, soon."""
        numbers = [turn.number for turn in turns]
        if numbers:
            self._channel.tell(WithdrawTurns(key=session.key, numbers=numbers))

    def received(self, session: Session, turns: Sequence[Turn]) -> None:
        """Tells the owner that a client has turns."""
        numbers = [turn.number for turn in turns]
        self._channel.tell(ReceivedTurns(key=session.key, numbers=numbers))

    async def unname(self, session: Session, turn: Turn) -> None:
        """Returns when the owner has forgotten the name of a turn's answer."""
        await self._channel.call(
            UnnameTurn(key=session.key, number=turn.number), seconds=CALL_SECONDS
        )

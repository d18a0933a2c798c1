"""What the owner of a gateway does for its workers: generates, and keeps turns."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.keeping import Keeper, check_takes_turns
from torchrl_sglang.gateway.policy import Parsers
from torchrl_sglang.gateway.processes.channel import Part
from torchrl_sglang.gateway.processes.messages import (
    Flush,
    Generate,
    KeepTurns,
    NewTokens,
    Parse,
    ReceivedTurns,
    SentPrompt,
    Synchronize,
    UnnameTurn,
    WithdrawTurns,
)
from torchrl_sglang.gateway.processes.remote import TOKEN_IDS, UNKNOWN_TURN
from torchrl_sglang.gateway.registry import SessionRegistry
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import TurnRow, from_row
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.policies.engine_call import AsyncGenerates
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.event_loop import run_async
from torchrl_sglang.telemetry.tracing import span
from torchrl_sglang.types import Completion


class OwnerEngine(AsyncGenerates, Protocol):
    """Members of an engine that workers need."""

    @property
    def control(self) -> Parsers:
        """Parsers of the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Takes the messages of a gateway's workers."""

    engine: OwnerEngine
    """Engine of the gateway."""
    registry: SessionRegistry
    """Its sessions."""
    keeper: Keeper
    """Where their turns are kept."""
    token_columns: Sequence[TokenColumn]
    """Quantities that are recorded of each token."""
    unreceived: WeakKeyDictionary[Session, set[Turn]] = field(
        default_factory=WeakKeyDictionary
    )
    """Turns of which no worker has told yet that a client has them."""

    def handle(self, message: Any, part: Part) -> Awaitable[Any] | None:
        """Takes a message, and returns what its answer is."""
        if isinstance(message, Generate):
            return self._generate(message, part)
        if isinstance(message, KeepTurns):
            return self._keep(message)
        if isinstance(message, Parse):
            return self._parse(message)
        if isinstance(message, WithdrawTurns):
            self._withdraw(message)
        elif isinstance(message, ReceivedTurns):
            self._received(message)
        elif isinstance(message, UnnameTurn):
            return self._unname(message)
        elif isinstance(message, Flush):
            return self.keeper.written()
        elif not isinstance(message, Synchronize):
            raise TypeError(f"A worker says {message!r}.")
        return None

    async def _generate(self, asked: Generate, part: Part) -> list[Completion]:
        """Returns the engine's responses, and tells of their tokens meanwhile."""
        session = self._named(asked.requests[0].session_id or "")
        prompts: dict[int, list[int]] = {}
        for each in asked.prompts:
            # Responses to one prompt share it.
            if id(each) not in prompts:
                prompts[id(each)] = _unpack(session, each)
        requests = [
            replace(
                request,
                input_ids=prompts[id(prompt)],
                priority=session.priority,
                token_columns=self.token_columns,
                on_tokens=_teller(index, part) if asked.live else None,
            )
            for index, (request, prompt) in enumerate(
                zip(asked.requests, asked.prompts, strict=True)
            )
        ]
        session.generating += len(requests)
        try:
            await self.keeper.writable()
            with span(
                "chat",
                kind="server",
                of=session,
                session=session.name,
                gen_ai__operation__name="chat",
            ):
                return await self.engine.agenerate_requests(
                    requests,
                    timeout=asked.timeout,
                    request_timeout=asked.request_timeout,
                    return_exceptions=asked.return_exceptions,
                )
        finally:
            session.generating -= len(requests)

    async def _parse(self, asked: Parse) -> dict[str, Any]:
        parse = self.engine.control.parse_response(asked.path, asked.content)
        return await run_async(parse)

    async def _keep(self, asked: KeepTurns) -> None:
        """Keeps turns of a worker in their session here."""
        session = self._keyed(asked.key)
        turns = to_turns(session, asked.rows)
        await self.keeper.keep(session, turns, new=asked.new)
        # A client that goes on from a turn has it.
        seen = {turn.prompt.origin for turn in turns}
        self.unreceived[session] = {*self._waiting(session), *turns} - seen

    def _withdraw(self, told: WithdrawTurns) -> None:
        session = self.registry.keyed(told.key)
        if session is not None:
            known = {turn.number: turn for turn in session.turns}
            turns = [known[each] for each in told.numbers if each in known]
            self._waiting(session).difference_update(turns)
            self.keeper.withdraw(session, turns)

    def _received(self, told: ReceivedTurns) -> None:
        session = self.registry.keyed(told.key)
        if session is not None:
            waiting = self._waiting(session)
            waiting -= {turn for turn in waiting if turn.number in told.numbers}

    def _waiting(self, session: Session) -> set[Turn]:
        return self.unreceived.get(session, set())

    def withdraw_unreceived(self, sessions: Iterable[Session]) -> None:
        """Removes turns that no client has, of sessions whose worker has ended."""
        for session in sessions:
            turns = self.unreceived.pop(session, set())
            self.keeper.withdraw(session, list(turns))

    async def _unname(self, asked: UnnameTurn) -> None:
        session = self._keyed(asked.key)
        await self.keeper.unname(session, session.turn(asked.number))

    def _named(self, name: str) -> Session:
        return self._found(self.registry.named(name), name)

    def _keyed(self, key: str) -> Session:
        return self._found(self.registry.keyed(key), "")

    def _found(self, session: Session | None, name: str) -> Session:
        if session is None:
            raise GatewayError(
                f"The session {name!r} was dropped, and takes nothing more."
                if name
                else "The session was dropped, and takes nothing more.",
                status=410,
            )
        check_takes_turns(session)
        return session


def _unpack(session: Session, prompt: SentPrompt) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
        GatewayError: if its session has not the turn that it begins with.
    """
    if prompt.parent is None:
        return prompt.token_ids.tolist()
    try:
        found = session.turn(prompt.parent).token_ids
    except ConfigurationError as error:
        raise GatewayError(str(error), code=UNKNOWN_TURN) from error
    found += prompt.token_ids
    return found


def _teller(index: int, part: Part) -> Callable[[list[int]], None]:
    """Returns what takes the tokens of a response, and tells those that are new."""
    known: list[int] = []

    def tell(token_ids: list[int]) -> None:
        nonlocal known
        # A response that begins anew may have other tokens.
        start = len(known) if token_ids[: len(known)] == known else 0
        known = token_ids
        new = array(TOKEN_IDS, token_ids[start:])
        part(NewTokens(index=index, start=start, token_ids=new))

    return tell


def to_turns(session: Session, rows: Sequence[TurnRow]) -> list[Turn]:
    """Returns the turns of rows; those that a session has are the session's own."""
    made: dict[int, Turn] = {}

    def find(number: int) -> Turn:
        return made[number] if number in made else session.turn(number)

    for row in rows:
        try:
            made[row[0]] = session.turn(row[0])
        except ConfigurationError:
            made[row[0]] = from_row(row, find)
    return list(made.values())

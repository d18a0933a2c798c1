"""What a worker asks of the owner's engine: prompts in part, tokens as they come."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.keeping import Keeper
from torchrl_sglang.gateway.policy import PromptTokens
from torchrl_sglang.gateway.processes.channel import Channel
from torchrl_sglang.gateway.processes.messages import Generate, SentPrompt
from torchrl_sglang.gateway.processes.owner import Owner
from torchrl_sglang.gateway.processes.remote import OwnerStore, RemoteEngine
from torchrl_sglang.gateway.registry import SessionRegistry
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.types import Completion

TOLD = [[1, 2], [1, 2, 3], [9], [9, 8]]
"""Tokens as an engine tells them; the response begins anew in the middle."""


class StubEngine:
    """Keeps what it is asked for, and tells of tokens."""

    capabilities: Any = None
    control: Any = None

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def agenerate_requests(
        self, requests: Sequence[GenerateRequest], **options: Any
    ) -> list[Completion]:
        self.asked += requests
        for request in requests:
            if request.on_tokens is not None:
                for token_ids in TOLD:
                    await asyncio.to_thread(request.on_tokens, token_ids)
        return [Completion(token_ids=[9, 8], finish_reason="stop") for _ in requests]


def make_turn(number: int, new: Sequence[int], origin: Turn | None = None) -> Turn:
    prompt = Prompt(
        setting=PromptSettings(),
        new_messages=[{"role": "user", "content": str(number)}],
        new_token_ids=new,
        origin=origin,
    )
    done = Completion(token_ids=[100 + number], finish_reason="stop")
    reply = {"role": "assistant", "content": "said"}
    return Turn(
        number=number,
        prompt=prompt,
        completion=done,
        text="said",
        reply=reply,
        ended=True,
    )


class Pair:
    """An owner with one session, and a worker that asks it."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.engine, registry = StubEngine(), SessionRegistry(lock)
        self.session = Session("a", key="k")
        self.session.priority = 7
        registry.add(self.session)
        self.heard: list[Any] = []
        self._owner = Owner(
            engine=self.engine,
            registry=registry,
            keeper=Keeper(None, lock),
            token_columns=(),
        )

    def _handle(self, message: Any, part: Any) -> Any:
        self.heard.append(message)
        return self._owner.handle(message, part)

    def run(self, work: Any) -> Any:
        """Returns what a function of the worker's channel returns."""

        async def main() -> Any:
            ends = socket.socketpair()
            own = await Channel.over(ends[0], self._handle)
            asking = await Channel.over(ends[1], lambda message, part: None)
            tasks = [asyncio.ensure_future(each.serve()) for each in (own, asking)]
            try:
                return await asyncio.wait_for(work(asking), 30)
            finally:
                asking.close()
                await asyncio.gather(*tasks)

        return asyncio.run(main())

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        def work(channel: Channel) -> Any:
            engine = RemoteEngine(channel, self.engine.capabilities, "model")
            return engine.agenerate_requests(requests, timeout=30)

        found: list[Completion] = self.run(work)
        return found

    def sent(self) -> list[SentPrompt]:
        """Returns the prompts of the calls so far."""
        calls = [each for each in self.heard if isinstance(each, Generate)]
        return [prompt for call in calls for prompt in call.prompts]


def ask_for(prompt: Prompt, **others: Any) -> GenerateRequest:
    return GenerateRequest(input_ids=PromptTokens(prompt), session_id="a", **others)


def test_only_what_is_new_of_a_prompt_is_sent() -> None:
    pair = Pair()
    first = make_turn(0, [1, 2])
    pair.session.add(first)
    following = make_turn(1, [3], first)
    request = ask_for(following.prompt)
    # Two responses to one prompt, and a request of nobody's turn.
    plain = GenerateRequest(input_ids=[4, 5], session_id="a")
    pair.generate([request, request, plain])
    assert [list(each.token_ids) for each in pair.sent()] == [[3], [3], [4, 5]]
    asked = [list(each.input_ids) for each in pair.engine.asked]
    assert asked == [[1, 2, 100, 3], [1, 2, 100, 3], [4, 5]]
    assert [each.priority for each in pair.engine.asked] == [7, 7, 7]


def test_a_prompt_behind_a_turn_that_was_withdrawn_is_sent_whole() -> None:
    pair = Pair()
    following = make_turn(1, [3], make_turn(0, [1, 2]))
    (done,) = pair.generate([ask_for(following.prompt)])
    assert done.token_ids == [9, 8]
    assert [list(each.token_ids) for each in pair.sent()] == [[3], [1, 2, 100, 3]]
    assert [list(each.input_ids) for each in pair.engine.asked] == [[1, 2, 100, 3]]
    assert pair.session.generating == 0


def test_tokens_come_as_the_engine_tells_them() -> None:
    pair, told = Pair(), []
    pair.generate([ask_for(make_turn(0, [1]).prompt, on_tokens=told.append)])
    assert told == TOLD
    # Nobody is told where nobody asks.
    pair.generate([ask_for(make_turn(0, [1]).prompt)])
    assert pair.engine.asked[-1].on_tokens is None


def test_turns_are_kept_withdrawn_and_kept_again() -> None:
    pair, own = Pair(), Session("a", key="k")
    first = make_turn(0, [1, 2])
    second = make_turn(1, [3], first)

    async def work(channel: Channel) -> None:
        store = OwnerStore(channel)
        await store.save_turns(own, [first], new=1)
        store.delete_turns(own, [first])
        # Another request goes on from it, whose client has seen it.
        await store.save_turns(own, [first, second], new=1)
        store.delete_turns(own, [first])
        store.delete_turns(own, [])
        await store.written()
        kept = pair.session.turns[0]
        await store.save_turns(own, [first])
        assert pair.session.turns[0] is kept

    pair.run(work)
    turns = pair.session.turns
    assert [turn.number for turn in turns] == [0, 1]
    assert turns[1].prompt.origin is turns[0]
    assert turns[1].token_ids == second.token_ids
    assert pair._owner.keeper.counts.turns == 2


def test_turns_that_no_client_has_end_with_their_worker() -> None:
    pair, own = Pair(), Session("a", key="k")
    turns = [make_turn(0, [1])]
    turns += [make_turn(number, [3], turns[0]) for number in (1, 2, 3)]

    async def work(channel: Channel) -> None:
        store = OwnerStore(channel)
        await store.save_turns(own, turns[:1], new=1)
        for turn in turns[1:]:
            await store.save_turns(own, [turn], new=1)
        store.received(own, [turns[2]])
        await store.written()

    pair.run(work)
    pair._owner.withdraw_unreceived([pair.session])
    # A client goes on from the first one, so that it has it.
    assert [turn.number for turn in pair.session.turns] == [0, 2]


def test_a_session_that_was_dropped_takes_nothing() -> None:
    pair = Pair()
    pair.session.is_dropped = True

    def work(channel: Channel) -> Any:
        return OwnerStore(channel).save_turns(pair.session, [make_turn(0, [1])])

    with pytest.raises(GatewayError, match="was dropped") as dropped:
        pair.run(work)
    assert dropped.value.status == 410
    assert not pair.session.turns
    with pytest.raises(GatewayError, match="was dropped"):
        pair.generate([ask_for(make_turn(0, [1]).prompt)])

"""Gives servers the earlier responses that they take drafts from.

Drafts change no token's distribution and no log-prob, so nothing here ends a run: what
servers did not take costs speed, and one warning.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.generation.draft_history import Acceptance, DraftHistory
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.support.digest import digest
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.types import Completion, DraftStats, HistoryDrafts

PREFIX = "torchrl_sglang-"
"""Of the names of the texts. Those of another engine object are replaced, too: servers
divide the drafts among the names."""

MISREAD = 0.1
"""Share of the tokens that a server may read in another way before that is told."""


class DraftFeed:
    """Remembers the responses of an engine, and sends them to its servers.

    For the background loop only.

    Args:
        control: sends them.
        get_tokenizer: returns the servers' tokenizer; called in a thread.
        drafts: what was asked for.
    """

    def __init__(
        self,
        control: ControlPlane,
        get_tokenizer: Callable[[], Any],
        drafts: HistoryDrafts,
    ) -> None:
        self._control = control
        self._get_tokenizer = get_tokenizer
        self._drafts = drafts
        self._reset()
        # Requests of a parent process do not end in its child.
        after_fork(self._reset)

    def _reset(self) -> None:
        self._history = DraftHistory(self._drafts.max_tokens)
        self._acceptance = Acceptance(self._drafts.least_length)
        self._feeding: asyncio.Task[None] | None = None
        self._sent = 0
        self._warned = self._off = False

    def stats(self) -> DraftStats:
        """Returns what has been remembered, sent and accepted."""
        return DraftStats(
            prompts=len(self._history),
            tokens=self._history.tokens,
            sent_tokens=self._sent,
            accepted_length=self._acceptance.length,
            on=not self._off,
        )

    def begin(self, request: GenerateRequest) -> bytes | None:
        """A request is about to be sent; returns what :meth:`end` takes."""
        if self._off:
            return None
        key = digest(request.input_ids)
        self._history.begin(key)
        if self._history.is_due and (self._feeding is None or self._feeding.done()):
            self._feeding = asyncio.ensure_future(self._feed())
        return key

    def end(
        self, key: bytes | None, request: GenerateRequest, completion: Completion
    ) -> None:
        """A request has its response."""
        if self._off or key is None:
            return
        response = completion.token_ids
        self._history.end(key, request.input_ids, response)
        if self._sent and completion.verify_passes:
            self._acceptance.add(len(response), completion.verify_passes)
            if self._acceptance.is_too_short:
                self._switch_off()

    async def close(self) -> None:
        """Ends what is under way."""
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)

    async def _feed(self) -> None:
        """Sends what is remembered, in the place of what servers have."""
        texts = self._history.take()
        try:
            decoded = await asyncio.to_thread(self._decode, texts)
            tokens = sum(map(len, texts)) + len(texts) - 1
            if await self._replace(decoded, tokens):
                self._sent = tokens
        except Exception as error:  # noqa: BLE001 - A run never fails for its drafts.
            self._warn(f"{type(error).__name__}: {error}")

    def _decode(self, texts: list[list[int]]) -> list[str]:
        tokenizer = self._get_tokenizer()
        return [
            tokenizer.decode(
                text, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            for text in texts
        ]

    async def _replace(self, texts: list[str], tokens: int) -> bool:
        """Gives servers texts of so many tokens; returns whether one has them."""
        name = f"{PREFIX}{secrets.token_hex(8)}"

        async def one(url: str) -> bool:
            try:
                (loaded,) = await self._control.add_draft_texts(name, texts, urls=[url])
                await self._remove_others(name, url)
            except SGLangError as error:
                self._warn(f"{type(error).__name__}: {error}")
                return False
            if abs(loaded - tokens) > MISREAD * tokens:
                self._warn(
                    f"{url} reads {loaded:,} tokens in texts of {tokens:,}: its "
                    f"tokenizer encodes what this one decodes in another way, so that "
                    f"many drafts are wrong."
                )
            return True

        return any(await fan_out(one, list(self._control.urls)))

    async def _remove_others(self, name: str, url: str) -> None:
        (held,) = await self._control.draft_texts(urls=[url])
        for other in _others(held, name):
            await self._control.remove_draft_texts(other, urls=[url])

    def _switch_off(self) -> None:
        self._off = True
        length, least = self._acceptance.length, self._drafts.least_length
        torchrl_logger.warning(
            f"Drafts of earlier responses are switched off: a pass gives {length:.2f} "
            f"tokens, and from {least} on they pay (HistoryDrafts(least_length=...)). "
            f"Servers verify drafts of their own all the same until they are started "
            f"without drafts='history', which is faster."
        )
        self._history = DraftHistory(self._drafts.max_tokens)
        self._feeding = asyncio.ensure_future(self._withdraw(self._feeding))

    async def _withdraw(self, feeding: asyncio.Future[None] | None) -> None:
        if feeding is not None:
            # A server would take texts that are under way after it was asked for them.
            await asyncio.gather(feeding, return_exceptions=True)
        for url in list(self._control.urls):
            try:
                await self._remove_others("", url)
            except SGLangError as error:
                torchrl_logger.debug(f"{url} keeps texts for drafts: {error}")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            torchrl_logger.warning(
                f"Drafts of earlier responses do not work as they should, which costs "
                f"speed and nothing else. {problem} This is told once."
            )


def _others(held: Mapping[str, Any], name: str) -> list[str]:
    """Returns the names of this package's texts on a server, but for one of them."""
    return [each for each in held if each.startswith(PREFIX) and each != name]

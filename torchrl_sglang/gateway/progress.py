"""Streams the stable prefix of a response to its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from contextlib import suppress

from torchrl_sglang.gateway.drafts import Detokenizer, Draft, DraftReader


class Progress:
    """Stable prefixes of the responses to a request. Used from a single event loop."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        """Tokens of the prompt; ``None`` until they are known."""
        self.drafts: dict[int, Draft] = {}
        """Beginning of each response, by its number."""
        self._changed = asyncio.Event()

    def begin(self, prompt_tokens: int) -> None:
        """Begins the generation of a valid request."""
        # No event yet: an unavailable server shows in the answer's status.
        self.prompt_tokens = prompt_tokens

    def tell(self, number: int, draft: Draft) -> None:
        """Updates the stable prefix of a response."""
        if self.drafts.get(number) != draft:
            self.drafts[number] = draft
            self._changed.set()

    async def changed(self) -> None:
        """Waits for an update since the last call."""
        await self._changed.wait()
        self._changed.clear()


class Follower:
    """Reads a response during its generation, as often as there is time.

    ``begin`` is called at the first tokens, and returns the end tokens outside of the
    text.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[DraftReader, Set[int]]],
        decode: Detokenizer,
        tell: Callable[[Draft], None],
    ) -> None:
        self._begin, self._tell = begin, tell
        self._to_text = decode
        self._latest: list[int] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def on_tokens(self, token_ids: list[int]) -> None:
        """Receives all tokens so far, in any thread."""
        with suppress(RuntimeError):
            # The loop may be closed.
            self._loop.call_soon_threadsafe(self._put, token_ids)

    def _put(self, token_ids: list[int]) -> None:
        self._latest = token_ids
        self._changed.set()

    async def run(self) -> None:
        """Reads until it is cancelled."""
        await self._changed.wait()
        reader, ends = self._begin()
        while True:
            await self._changed.wait()
            self._changed.clear()
            ids = self._latest
            if ids and ids[-1] in ends:
                ids = ids[:-1]
            self._tell(await reader.read(self._to_text(ids)))

"""Detects responses that a weight update has made worthless."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.dispatch import Response
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.backends.lora.registry import AdapterRegistry
from torchrl_sglang.backends.support.versions import version_order
from torchrl_sglang.errors import GenerationAbortedError, WeightSyncStateError
from torchrl_sglang.types import Completion

__all__ = ["Staleness"]

MOST_CHECKS = 3
"""How often in a row servers are checked for older weights without finding any."""


class Staleness:
    """Decides whether a response must be generated again after a weight update."""

    def __init__(self, fleet: Fleet, adapters: AdapterRegistry) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._checked_at = -math.inf
        self._vain_checks = 0
        self._checking: asyncio.Task[None] | None = None

    async def is_stale(self, request: GenerateRequest, response: Response) -> bool:
        """Returns whether a request has to be sent again."""
        outcome, sent_with = response.outcome, response.weights
        aborted = self._fleet.weights.abort_epoch > sent_with.abort_epoch
        if isinstance(outcome, GenerationAbortedError):
            return aborted and not outcome.requested
        if not isinstance(outcome, Completion):
            return False
        if (
            aborted
            and request.adapter is None
            and outcome.adapter != self._adapters.default
        ):
            # It was sent with the previous default adapter.
            return True
        if outcome.weight_version is None:
            return False
        if version_order(outcome.weight_version) < version_order(sent_with.version):
            # Another process restarted the server, and this one did not know.
            await self._check_servers(response.sent_at)
            return True
        self._vain_checks = 0
        self._fleet.weights_state.observe(outcome.weight_version)
        return self._used_stale_cache(outcome, sent_with.version)

    def kept(self, response: Response) -> Completion | None:
        """Returns the tokens of an aborted response that the rest can follow."""
        error, sent_with = response.outcome, response.weights.version
        partial = getattr(error, "partial", None)
        if not isinstance(partial, Completion) or not partial.token_ids:
            return None
        older = version_order(partial.weight_version or "") < version_order(sent_with)
        if older or self._used_stale_cache(partial, sent_with):
            return None
        return partial

    async def _check_servers(self, sent_at: float) -> None:
        """Takes servers with older weights out of rotation, once for all requests."""
        if sent_at < self._checked_at:
            return
        if self._checking is None or self._checking.done():
            poll = self._fleet.poll
            if self._vain_checks >= MOST_CHECKS or poll is None:
                raise WeightSyncStateError(
                    f"A server answered with older weights than the current ones, "
                    f"{self._fleet.weights.version!r}, and does not say so itself: "
                    f"it was started again by somebody else. Send the weights again."
                )
            self._vain_checks += 1
            self._checking = asyncio.ensure_future(self._check(poll))
        await asyncio.shield(self._checking)

    async def _check(self, poll: Callable[[], Awaitable[Any]]) -> None:
        self._fleet.suspect()
        await poll()
        self._checked_at = time.monotonic()

    def _used_stale_cache(self, completion: Completion, key: str) -> bool:
        """Returns whether a response may rest on a KV cache of older weights."""
        # It may if it began with newer weights than its key, and found a prefix under
        # that: another engine object updated the weights, or the cache was not flushed.
        weights = self._fleet.weights
        if completion.versions:
            first = completion.versions[0].version
            suspect = first not in weights.clean_versions
        else:
            # It may have begun with any of them.
            first = completion.weight_version or ""
            suspect = first not in weights.in_place_versions
        newer = version_order(first) > version_order(key)
        return newer and suspect and completion.cached_tokens > 0

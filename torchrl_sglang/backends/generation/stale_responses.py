"""Detects responses that a weight update has made worthless."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.backends.lora.registry import Adapters
from torchrl_sglang.backends.support.versions import version_order
from torchrl_sglang.errors import (
    GenerationAbortedError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.types import Completion

__all__ = ["StaleResponses", "WeightsSnapshot"]

MOST_CHECKS = 3
"""How often in a row servers are checked for older weights without finding any."""


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """State of the weights when a request is sent."""

    version: str
    """Weight version, which separates prefix-cache entries."""
    abort_epoch: int
    """How often weight updates had aborted what was in flight."""
    checks: int
    """How often servers had been checked for older weights."""


class StaleResponses:
    """Decides whether a response must be generated again after a weight update."""

    def __init__(self, fleet: Fleet, adapters: Adapters) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._checks = self._vain_checks = 0
        self._checking: asyncio.Task[None] | None = None

    def snapshot(self) -> WeightsSnapshot:
        """Returns the state of the weights now."""
        weights = self._fleet.weights
        return WeightsSnapshot(weights.version, weights.abort_epoch, self._checks)

    async def is_stale(
        self,
        request: GenerateRequest,
        outcome: Completion | SGLangError,
        sent_at: WeightsSnapshot,
    ) -> bool:
        """Returns whether a request has to be sent again.

        Raises:
            WeightSyncStateError: if servers go on answering with older weights than
                those of ``sent_at``.
        """
        aborted = self._fleet.weights.abort_epoch > sent_at.abort_epoch
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
        if version_order(outcome.weight_version) < version_order(sent_at.version):
            # Another process restarted the server, and this one did not know.
            await self._check_servers(sent_at)
            return True
        self._vain_checks = 0
        return self._used_stale_cache(outcome, outcome.weight_version, sent_at.version)

    async def _check_servers(self, sent_at: WeightsSnapshot) -> None:
        """Takes servers with older weights out of rotation, once for all requests."""
        if sent_at.checks < self._checks:
            # They have been checked since.
            return
        if self._checking is None or self._checking.done():
            if self._vain_checks >= MOST_CHECKS or self._fleet.poll is None:
                raise WeightSyncStateError(
                    f"A server answered with older weights than the current ones, "
                    f"{self._fleet.weights.version!r}, and does not say so itself: "
                    f"it was started again by somebody else. Send the weights again."
                )
            self._vain_checks += 1
            self._checking = asyncio.ensure_future(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        if self._fleet.poll is not None:
            self._fleet.suspect_all()
            await self._fleet.poll()
        self._checks += 1

    def _used_stale_cache(self, completion: Completion, last: str, key: str) -> bool:
        """Adopts a newer weight version; returns whether the KV cache may be stale.

        A response that began with newer weights than ``key``, and with a cached prefix
        that was looked up under ``key``, may rest on KV cache of older weights: another
        engine object updated them meanwhile, or the cache was not flushed.
        """
        weights = self._fleet.weights
        self._fleet.weights_state.observe(last)
        if completion.versions:
            first = completion.versions[0].version
            suspect = first not in weights.clean_versions
        else:
            # It may have begun with any of them.
            first, suspect = last, last not in weights.in_place_versions
        newer = version_order(first) > version_order(key)
        return newer and suspect and completion.cached_tokens > 0

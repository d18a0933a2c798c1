"""Counters of one engine's requests and tokens, and its statistics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.types import EngineStats, ServerStats

__all__ = ["Counters", "collect_stats"]

RATE_SECONDS = 10.0
"""Window of the reported token rate."""

STATS_TIMEOUT_SECONDS = 5.0


@dataclass(kw_only=True)
class Counters:
    """Running totals of one engine object."""

    in_flight: int = 0
    """Requests that were sent and are not answered."""
    completed: int = 0
    """Finished responses."""
    retries: int = 0
    """Requests that were sent again."""
    prompt_tokens: int = 0
    """Prompt tokens of finished responses."""
    cached_tokens: int = 0
    """How many of them came from the prefix cache."""
    response_tokens: int = 0
    """Tokens of finished responses."""
    _recent: deque[tuple[float, int]] = field(default_factory=deque, repr=False)

    def count(self, prompt: int, cached: int, response: int) -> None:
        """Counts the tokens of a finished response."""
        self.completed += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.count_tokens(response)

    def count_tokens(self, response: int) -> None:
        """Counts tokens of a response that goes on."""
        self.response_tokens += response
        self._recent.append((time.monotonic(), response))
        self._drop_old()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - RATE_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second over the last ten seconds."""
        self._drop_old()
        return sum(count for _, count in self._recent) / RATE_SECONDS


async def collect_stats(
    fleet: Fleet, control: ControlPlane, counters: Counters, waiting: int
) -> EngineStats:
    """Asks the servers what they do, and adds what this engine has done."""

    async def one(replica: Replica) -> ServerStats:
        running = queued = version = None
        if replica.runs:
            urls = [replica.url]
            try:
                ((running, queued),) = await control.loads(
                    timeout=STATS_TIMEOUT_SECONDS, urls=urls
                )
                (version,) = await control.weight_versions(
                    timeout=STATS_TIMEOUT_SECONDS, urls=urls
                )
            except SGLangError as error:
                torchrl_logger.debug(f"No statistics of a server: {error}")
        return ServerStats(
            url=replica.url,
            state=replica.status,
            running=running,
            queued=queued,
            weight_version=version,
            restarts=replica.restarts,
            reason=replica.reason,
        )

    servers = await asyncio.gather(*(one(replica) for replica in fleet.replicas))
    return EngineStats(
        in_flight=counters.in_flight,
        queued=waiting,
        completed=counters.completed,
        retries=counters.retries,
        restarts=sum(replica.restarts for replica in fleet.replicas),
        tokens_per_second=counters.tokens_per_second,
        prompt_tokens=counters.prompt_tokens,
        response_tokens=counters.response_tokens,
        cache_hit_rate=counters.cached_tokens / max(counters.prompt_tokens, 1),
        weight_version=fleet.weights.version,
        servers=tuple(servers),
    )

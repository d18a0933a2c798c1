"""Control calls: to every server directly, never through a router.

One method for each verb that SGLang has. A call succeeds only if every server says so;
otherwise the error tells which one failed and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torchrl_sglang.backends.http import HttpClient
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import PauseMode, ServerCapabilities

__all__ = ["ControlPlane"]

CONTROL_TIMEOUT_SECONDS = 60.0
"""Default budget for one control call."""


class Servers(Protocol):
    """Which servers there are."""

    @property
    def urls(self) -> Sequence[str]:
        """Servers that run, in the order of their ranks."""

    @property
    def membership(self) -> int:
        """Grows whenever a server joins."""


@dataclass
class Pausing:
    """Whether generation is paused, as far as this engine object knows."""

    paused: bool = False


class ControlPlane:
    """Sends control calls to a set of servers. Used from the background loop only.

    Args:
        http: connections.
        servers: which servers there are.
        capabilities: what they can do; the same for all of them.
    """

    def __init__(
        self, http: HttpClient, servers: Servers, capabilities: ServerCapabilities
    ) -> None:
        self._http = http
        self._servers = servers
        self.pausing = Pausing()
        self.capabilities = capabilities

    @property
    def urls(self) -> Sequence[str]:
        """Servers that run, in the order of their ranks."""
        return self._servers.urls

    @property
    def membership(self) -> int:
        """Grows whenever a server joins; a process group holds for one value."""
        return self._servers.membership

    async def _all(
        self,
        method: Literal["GET", "POST"],
        path: str,
        payload: Any = None,
        *,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        async def one(url: str) -> Any:
            answer = await self._http.request(
                method, url + path, payload, timeout=timeout
            )
            body = answer.raise_for_status().body
            if not body.lstrip().startswith((b"{", b"[")):
                return None
            content = answer.json()
            # Older versions answer 200 and say in the body that they failed.
            if isinstance(content, dict) and content.get("success") is False:
                raise RequestRefusedError(
                    f"{url}{path} refused: {content.get('message', content)}"
                )
            return content

        targets = self.urls if urls is None else urls
        if not targets:
            raise ServerUnavailableError(
                f"No server of the engine runs, so {path} went to none."
            )
        outcomes = await asyncio.gather(
            *(one(url) for url in targets), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, SGLangError):
                outcome.partly = any(
                    not isinstance(other, BaseException) for other in outcomes
                )
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def healthy(self, *, timeout: float = 10.0) -> bool:
        """Returns whether every server answers; never raises for one that does not."""
        try:
            await self._all("GET", "/health", timeout=timeout)
        except SGLangError:
            return False
        return True

    async def weight_versions(
        self, *, timeout: float = 10.0, urls: Sequence[str] | None = None
    ) -> list[str]:
        """Returns the weight version that each server reports."""
        answers = await self._all("GET", "/model_info", timeout=timeout, urls=urls)
        return [str(answer.get("weight_version") or "default") for answer in answers]

    async def running_requests(self, *, timeout: float = 10.0) -> int:
        """Returns how many requests are being computed on all servers together."""
        return sum(running for running, _ in await self.loads(timeout=timeout))

    async def loads(
        self, *, timeout: float = 10.0, urls: Sequence[str] | None = None
    ) -> list[tuple[int, int]]:
        """Returns how many requests each server computes and has waiting."""
        answers = await self._all(
            "GET", self.capabilities.load_route, timeout=timeout, urls=urls
        )
        return [_load(answer) for answer in answers]

    async def start_profile(
        self, options: Mapping[str, Any], *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Starts PyTorch's profiler in every server.

        Args:
            options: for SGLang's ``/start_profile``, such as ``output_dir`` and
                ``num_steps``.
            timeout: budget, in seconds.
        """
        await self._all("POST", "/start_profile", dict(options), timeout=timeout)

    async def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Stops it; the servers write their traces."""
        await self._all("POST", "/stop_profile", {}, timeout=timeout)

    async def pause(
        self, mode: PauseMode, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Stops generation.

        A scheduler takes control calls in the order in which they come, between two
        steps, so every later call finds no step running. How many requests run must
        not be asked meanwhile: some versions answer with the last value before the
        pause until generation goes on.
        """
        self.pausing.paused = True
        await self._all("POST", "/pause_generation", {"mode": mode}, timeout=timeout)

    async def resume(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Lets generation go on."""
        await self._all("POST", "/continue_generation", {}, timeout=timeout)
        self.pausing.paused = False

    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Empties the prefix caches; returns False if a server is too busy to do so."""
        try:
            await self._all("POST", "/flush_cache", timeout=timeout)
        except RequestRefusedError:
            return False
        return True

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Has every server join a process group; ranks follow the order of servers.

        Rank 0 is the sender. Server ``i`` has ranks ``1 + i * tp_size`` and on.
        """
        ranks = self.capabilities.tp_size * self.capabilities.pp_size

        async def one(index: int, url: str) -> None:
            payload = {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": 1 + index * ranks,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            }
            await self._all(
                "POST",
                "/init_weights_update_group",
                payload,
                timeout=timeout,
                urls=[url],
            )

        await asyncio.gather(*(one(i, url) for i, url in enumerate(self.urls)))

    async def destroy_weights_update_group(
        self, group_name: str, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Has every server leave a process group."""
        await self._all(
            "POST",
            "/destroy_weights_update_group",
            {"group_name": group_name},
            timeout=timeout,
        )

    async def begin_weight_update(
        self, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Opens an update session, where the servers have such sessions."""
        if self.capabilities.needs_update_session:
            await self._all("POST", "/begin_weight_update", {}, timeout=timeout)

    async def end_weight_update(
        self, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Closes the update session, where the servers have such sessions."""
        if self.capabilities.needs_update_session:
            await self._all("POST", "/end_weight_update", {}, timeout=timeout)

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None,
        timeout: float,
    ) -> None:
        """Has every server receive one bucket over a process group.

        Args:
            names: parameters, in the order in which they lie in the bucket.
            dtypes: their types, like ``"bfloat16"``.
            shapes: their shapes.
            group_name: a group that the servers have joined.
            weight_version: version to report from now on; given with the last bucket.
            timeout: budget, in seconds.
        """
        payload = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            # An update that flushes while requests are queued kills some versions.
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": weight_version,
        }
        await self._all(
            "POST", "/update_weights_from_distributed", payload, timeout=timeout
        )


def _load(answer: Any) -> tuple[int, int]:
    # /v1/loads: {"loads": [{"num_running_reqs": ...}]}; /get_load: a list of
    # {"num_reqs": all, "num_waiting_reqs": queued}. An entry for each data-parallel
    # rank.
    loads = answer.get("loads", []) if isinstance(answer, dict) else answer
    running = waiting = 0
    for load in loads:
        queued = int(load.get("num_waiting_reqs", 0))
        if "num_running_reqs" in load:
            running += int(load["num_running_reqs"])
        else:
            running += int(load.get("num_reqs", 0)) - queued
        waiting += queued
    return max(running, 0), waiting

"""RayDirectory: the addresses of an engine's servers, in a Ray actor without a CPU.

The driver of the servers publishes them; copies of the engine, in any process of the
cluster, read them. The actor ends with the engine, or with its driver.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrl_sglang.errors import ServerUnavailableError


class RayDirectory:
    """Addresses of an engine's servers in Ray; see :class:`.Directory`."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context = ray.get_runtime_context()
        self._name = f"torchrl_sglang_directory_{secrets.token_hex(8)}"
        self._namespace = context.namespace
        self._actor: Any = ray.remote(
            num_cpus=0,
            max_restarts=-1,
            name=self._name,
            # The actor ends with this process in any case, and must not end before.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                context.get_node_id(), soft=True
            ),
        )(_Addresses).remote()

    def publish(self, urls: Sequence[str]) -> None:
        """Records each server's address, by rank; empty: it is down. Does not wait."""
        if self._actor is not None and is_connected():
            self._actor.put.remote(tuple(urls))

    async def urls(self) -> Sequence[str]:
        """Returns the latest published addresses, or raises an SGLangError."""
        if not is_connected():
            raise ServerUnavailableError(
                "This process is not connected to the Ray cluster of the servers."
            )
        import ray

        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(
                    ray.get_actor, self._name, self._namespace
                )
            answer = self._actor.get.remote().future()
            urls: tuple[str, ...] = await asyncio.wrap_future(answer)
        except (ray.exceptions.RayError, ValueError) as error:
            raise ServerUnavailableError(
                f"The directory of the servers has ended: {error}"
            ) from error
        return urls

    def end(self) -> None:
        """Ends the actor."""
        if self._actor is not None and is_connected():
            import ray

            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._actor)

    def __getstate__(self) -> dict[str, Any]:
        # A handle could not be unpickled where Ray is not connected.
        return {"_name": self._name, "_namespace": self._namespace, "_actor": None}


class _Addresses:
    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()

    def put(self, urls: tuple[str, ...]) -> None:
        self._urls = urls

    def get(self) -> tuple[str, ...]:
        return self._urls


def is_connected() -> bool:
    """Returns whether this process is connected, without starting a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())

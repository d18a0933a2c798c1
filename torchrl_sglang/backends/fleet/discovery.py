"""Finding out what the servers of a new engine are: their fleet and capabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.capabilities import check_same, find_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.routing import RouterHandle
from torchrl_sglang.backends.support.versions import version_order
from torchrl_sglang.errors import ServerError
from torchrl_sglang.types import ServerCapabilities

__all__ = ["discover"]


async def discover(
    replicas: list[Replica],
    http: HttpClient,
    *,
    router: RouterHandle | None = None,
    start_router: Callable[[Sequence[str]], RouterHandle] | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Fleet, ServerCapabilities]:
    """Asks all servers what they are; of servers that are not ours, one must answer."""
    try:
        answers = await asyncio.gather(
            *(
                find_out(
                    http,
                    replica.url,
                    model=model,
                    trust_remote_code=trust_remote_code,
                )
                for replica in replicas
            ),
            return_exceptions=True,
        )
    finally:
        await http.close()
    found: dict[Replica, ServerCapabilities] = {}
    away: dict[Replica, ServerError] = {}
    for replica, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, ServerError) and replica.handle is None:
            away[replica] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[replica] = answer
    if not found:
        raise next(iter(away.values()))
    (first, known), *others = found.items()
    for replica, capabilities in others:
        check_same(known, first.url, capabilities, replica.url)
    newest = max((c.weight_version for c in found.values()), key=version_order)
    for replica, error in away.items():
        torchrl_logger.warning(
            f"The server at {replica.url} gets no requests until it answers: {error}"
        )
        replica.state, replica.reason = "down", str(error)
    for replica, capabilities in found.items():
        _record(replica, capabilities, newest)
    fleet = Fleet(
        replicas=replicas,
        weight_version=newest,
        router=router,
        start_router=start_router,
    )
    return fleet, known


def _record(replica: Replica, capabilities: ServerCapabilities, newest: str) -> None:
    """Records what a server holds, and whether its weights are stale."""
    replica.start_id = capabilities.start_id
    replica.version = capabilities.weight_version
    replica.held_adapters = set(capabilities.adapters)
    if capabilities.weight_version != newest:
        replica.state = "stale"
        replica.reason = (
            f"{replica.url} has weights of version {capabilities.weight_version!r}, "
            f"and others have {newest!r}."
        )

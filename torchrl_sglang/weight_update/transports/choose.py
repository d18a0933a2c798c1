"""Which transport an update takes, and why: pure.

What a transport cannot do it says itself when it connects. Here it is decided which one
is asked, from where the weights and the servers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ServerPlacement

__all__ = [
    "Choice",
    "Facts",
    "Reach",
    "TransportName",
    "check_arguments",
    "choose",
    "reach_of",
]

TransportName: TypeAlias = Literal["auto", "broadcast", "cuda_ipc", "disk", "lora"]
"""What a scheme's ``transport`` can be."""

_USED = {
    "master_address": ("broadcast",),
    "master_port": ("broadcast",),
    "connect_timeout": ("broadcast",),
    "directory": ("disk",),
    "adapter": ("lora",),
    "pin_adapter": ("lora",),
}
"""Argument of a scheme -> the transports that use it, where not all do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Whether a server can open the memory of the weights."""

    url: str
    """Its address."""
    opens: bool | None
    """Whether it can; ``None`` where it is not known which GPUs it sees."""
    shares: bool
    """Whether one of its ranks computes on the GPU of the weights."""
    why: str = ""
    """Why it cannot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a choice depends on."""

    device: str
    """Where the weights are, like ``"cuda:0"``."""
    gpu_names: frozenset[str] = frozenset()
    """What that GPU is called: in ``CUDA_VISIBLE_DEVICES``, and its UUID."""
    servers: tuple[ServerPlacement, ...]
    """Where the servers are."""
    pp_size: int
    """Pipeline stages of each."""
    directory: str | None
    """Where checkpoints can be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A transport and the reason for it."""

    name: TransportName
    """Which one."""
    reason: str
    """A sentence."""


def check_arguments(transport: str, given: Mapping[str, Any]) -> None:
    """Checks a scheme's arguments against its transport.

    Args:
        transport: a name; with ``"auto"``, that a transport can use everything.
        given: the arguments that were given, out of those that not every transport
            uses.

    Raises:
        ConfigurationError: if there is no such transport, or it does not use an
            argument, or lacks one.

    Examples:
        >>> check_arguments("disk", {"directory": "/shared/weights"})
    """
    names = get_args(TransportName)
    if transport not in names:
        raise ConfigurationError(
            f"transport={transport!r} is not one of {', '.join(map(repr, names))}."
        )
    if transport == "disk" and "directory" not in given:
        raise ConfigurationError(
            "transport='disk' needs directory=..., a folder that this process and "
            "every server see under the same path."
        )
    for name in given:
        fitting = _USED[name]
        if transport not in ("auto", *fitting):
            raise ConfigurationError(
                f"{name}={given[name]!r} is for transport={fitting[0]!r}, and "
                f"transport={transport!r} does not use it; leave it out."
            )
    if "directory" in given and len(given) > 1:
        other = next(name for name in given if name != "directory")
        raise ConfigurationError(
            f"directory={given['directory']!r} is for transport='disk', which does not "
            f"use {other}={given[other]!r}; leave one of them out."
        )


def choose(facts: Facts) -> Choice:
    """Returns the fastest transport that works.

    Raises:
        ConfigurationError: if only one that needs a directory does.

    Examples:
        >>> server = ServerPlacement(url="http://host-2:80", local=False, device="cuda")
        >>> choose(
        ...     Facts(device="cuda:0", servers=(server,), pp_size=1, directory=None)
        ... ).name
        'broadcast'
    """
    if facts.directory is not None:
        return Choice(
            name="disk", reason=f"A directory was given: {facts.directory!r}."
        )
    if facts.pp_size > 1:
        raise ConfigurationError(
            f"The servers have {facts.pp_size} pipeline stages each, and take weights "
            f"from files only; give directory=..., a folder that this process and "
            f"every server see under the same path."
        )
    reaches = [reach_of(server, facts) for server in facts.servers]
    if any(reach.shares for reach in reaches):
        for reach in reaches:
            if not reach.opens:
                why = reach.why or "It is not known which GPUs it sees."
                raise ConfigurationError(
                    f"A server computes on the GPU of the weights ({facts.device}), "
                    f"which NCCL does not allow, and the server at {reach.url} cannot "
                    f"open their memory: {why} Give directory=..., a folder that this "
                    f"process and every server see under the same path."
                )
        return Choice(
            name="cuda_ipc",
            reason=f"The servers share the GPU of the weights, {facts.device}.",
        )
    return Choice(name="broadcast", reason=_why_broadcast(facts))


def _why_broadcast(facts: Facts) -> str:
    if not facts.device.startswith("cuda"):
        return f"The weights are on {facts.device}, which servers do not share."
    if all(server.gpus is not None for server in facts.servers):
        return f"The servers compute elsewhere than on {facts.device}."
    return (
        f"It is not known that the servers share the GPU of the weights, "
        f"{facts.device}; if they do, give transport='cuda_ipc'."
    )


def reach_of(server: ServerPlacement, facts: Facts) -> Reach:
    """Returns whether a server can open the memory of the weights."""
    if server.device not in ("cuda", None):
        return Reach(
            url=server.url,
            opens=False,
            shares=False,
            why=f"It computes on {server.device!r}.",
        )
    if not server.local:
        return Reach(
            url=server.url, opens=False, shares=False, why="It runs on another machine."
        )
    if server.visible_gpus is None:
        return Reach(url=server.url, opens=None, shares=False)
    opens = any(_is_same(name, facts.gpu_names) for name in server.visible_gpus)
    return Reach(
        url=server.url,
        opens=opens,
        shares=any(_is_same(name, facts.gpu_names) for name in server.gpus or ()),
        why=""
        if opens
        else f"It sees the GPUs {', '.join(server.visible_gpus) or 'none'} only.",
    )


def _is_same(name: str, names: frozenset[str]) -> bool:
    # A UUID can be shortened.
    is_uuid = name.startswith("GPU-")
    return name in names or (is_uuid and any(known.startswith(name) for known in names))

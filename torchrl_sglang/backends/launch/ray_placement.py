"""Selection of placement-group bundles for each server.

A server takes *seats* on each of its nodes: shares of a bundle, each held by an actor.
A placement group of the launcher has a bundle for each node of each server. In a user's
group, bundles may hold a single GPU, and a server then takes several of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Resources of a server on each of its nodes."""

    nodes: int = 1
    gpus: int = 0
    """GPUs on each of them; 0 on CPU."""
    gpu_fraction: float = 1.0
    """Reserved share of each GPU."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other reserved resources, ``"CPU"`` among them."""

    @property
    def reserved_gpus(self) -> float:
        """GPUs in Ray's count, on each node."""
        return self.gpus if self.gpu_fraction == 1 else self.gpus * self.gpu_fraction

    @property
    def text(self) -> str:
        """Reserved resources of each server, for a message."""
        gpus = {"GPU": self.reserved_gpus} if self.gpus else {}
        suffix = " on each of its nodes" if self.nodes > 1 else " on one node"
        return _shown({**self.resources, **gpus}) + suffix

    def as_bundle(self) -> dict[str, float]:
        """Returns the bundle for a node of a server."""
        if self.gpu_fraction < 1 and self.gpus > 1:
            raise ConfigurationError(
                f"gpu_fraction={self.gpu_fraction!r} is for servers with one GPU, and "
                f"each of these takes {self.gpus}: Ray could put several shares on "
                f"one GPU. Give a placement_group with bundles of one GPU."
            )
        bundle = {**self.resources, "GPU": self.reserved_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise ConfigurationError(
                f"resources={dict(self.resources)!r} reserves nothing for a server on "
                f"CPU; give it CPUs."
            )
        return bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A bundle of a placement group, as Ray reports it."""

    index: int
    node: str
    size: Mapping[str, float]
    free: Mapping[str, float]
    """Resources without an actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A share of a bundle for an actor."""

    bundle: int
    gpus: float
    resources: Mapping[str, float]


Seats = Sequence[Sequence[Seat]]
"""Seats of a server, by node."""


def own_seats(demand: Demand, count: int) -> list[Seats]:
    """Returns the seats of servers in a group with a bundle for each of their nodes."""
    return [
        [
            [
                Seat(
                    bundle=rank * demand.nodes + node,
                    gpus=demand.reserved_gpus,
                    resources=demand.resources,
                )
            ]
            for node in range(demand.nodes)
        ]
        for rank in range(count)
    ]


def choose_seats(bundles: Sequence[Bundle], demand: Demand, count: int) -> list[Seats]:
    """Returns the seats of servers in a user's placement group.

    Bundles are taken in their order, node by node: the GPUs of a server are neighbours,
    and all on the same node. Each part of a multi-node server is on another node.
    """
    by_node: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        by_node.setdefault(bundle.node, []).append(bundle)
    parts = {node: list(_parts(some, demand)) for node, some in by_node.items()}
    seats: list[Seats] = []
    for _ in range(count):
        nodes = [node for node, free in parts.items() if free]
        if demand.nodes > 1:
            # The emptiest nodes first, to find room for most servers.
            nodes.sort(key=lambda node: len(parts[node]), reverse=True)
        if len(nodes) < demand.nodes:
            raise ConfigurationError(_too_few(by_node, demand, count, len(seats)))
        seats.append([parts[node].pop(0) for node in nodes[: demand.nodes]])
    return seats


def _parts(bundles: Sequence[Bundle], demand: Demand) -> Iterator[list[Seat]]:
    """Yields the possible seats of a server on a node."""
    if not demand.gpus:
        for bundle in bundles:
            for _ in range(_fits(bundle.free, demand.resources)):
                yield [Seat(bundle=bundle.index, gpus=0.0, resources=demand.resources)]
        return
    remaining = {bundle.index: dict(bundle.free) for bundle in bundles}
    part: list[Seat] = []
    missing = demand.gpus
    for bundle, gpus in _shares(bundles, demand):
        # Whole seats: an oversized seat remains for others.
        if gpus > missing:
            continue
        # The first actor runs the server, and the others hold GPUs.
        resources = {} if part else demand.resources
        if not _take(remaining[bundle.index], resources):
            continue
        share = gpus * demand.gpu_fraction if demand.gpu_fraction < 1 else gpus
        part.append(Seat(bundle=bundle.index, gpus=share, resources=resources))
        missing -= gpus
        if not missing:
            yield part
            part, missing = [], demand.gpus


def _shares(bundles: Sequence[Bundle], demand: Demand) -> Iterator[tuple[Bundle, int]]:
    """Yields each bundle once per actor in it, with the actor's GPUs."""
    for bundle in bundles:
        size, free = bundle.size.get("GPU", 0.0), bundle.free.get("GPU", 0.0)
        if demand.gpu_fraction < 1:
            # In a larger bundle, Ray would choose the shared GPU.
            if size <= 1 and free >= demand.gpu_fraction:
                yield bundle, 1
            continue
        gpus = min(int(size), demand.gpus)
        for _ in range(int(free) // gpus if gpus else 0):
            yield bundle, gpus


def _fits(free: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """Returns how often resources fit; once, if they are empty."""
    amounts = {name: amount for name, amount in resources.items() if amount}
    if not amounts:
        return 1
    # 0.3 of 0.9 fits three times.
    return min(int(free.get(n, 0.0) / amount + 1e-9) for n, amount in amounts.items())


def _take(left: dict[str, float], resources: Mapping[str, float]) -> bool:
    """Takes resources from the rest; returns False if they do not fit."""
    fits = _fits(left, resources) > 0
    for name, amount in resources.items() if fits else ():
        left[name] = left.get(name, 0.0) - amount
    return fits


def _too_few(
    by_node: Mapping[str, Sequence[Bundle]], demand: Demand, count: int, found: int
) -> str:
    shown = "; ".join(
        f"{node}: {', '.join(f'{b.index}: {_shown(b.free)}' for b in some)}"
        for node, some in by_node.items()
    )
    return (
        f"The placement_group has room for {found} of {count} "
        f"server{'s' * (count > 1)}, each of which takes {demand.text}. Free "
        f"in its bundles, by node and index: {shown or 'nothing'}. Give a "
        f"larger group, or another share with gpu_fraction= and resources=."
    )


def shortage(
    bundles: Sequence[Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]
) -> str | None:
    """Returns a sentence on resources missing on the nodes; ``None``: none."""
    total: dict[str, float] = {}
    for resources in nodes.values():
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + amount
    for bundle in bundles:
        if not any(_fits(resources, bundle) for resources in nodes.values()):
            return f"No node has {_shown(bundle)}; the nodes have {_nodes(nodes)}."
    needed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0.0) + amount
    if not _fits(total, needed):
        return f"All servers need {_shown(needed)}; the nodes have {_nodes(nodes)}."
    return None


def _nodes(nodes: Mapping[str, Mapping[str, float]]) -> str:
    kinds = ("CPU", "GPU")
    return "; ".join(
        f"{node}: {_shown({kind: has[kind] for kind in kinds if kind in has})}"
        for node, has in nodes.items()
    )


def _shown(resources: Mapping[str, float]) -> str:
    """Returns resources for a message, such as ``2 GPU, 1 CPU``."""
    shown = (f"{amount:g} {name}" for name, amount in sorted(resources.items())[::-1])
    return ", ".join(shown) or "nothing"

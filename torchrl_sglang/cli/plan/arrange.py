"""Chooses the placement of trainer and servers by counting bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from torchrl_sglang.cli.plan.memory import (
    GIB,
    HALF,
    RUNTIME,
    SLACK,
    ServerMemory,
    TrainerMemory,
    Workload,
    server_memory,
    trainer_memory,
)
from torchrl_sglang.cli.plan.shapes import Shape

SERVER_SHARE = 0.85
"""Share of a server's own GPU for weights and KV cache, close to SGLang's choice."""

LARGEST_COLOCATED_SHARE, SHARE_STEP = 0.6, 0.05
"""Share of a GPU of a server asleep during training: ``GRPO``'s default, or less by
steps of this size."""

TOKENS_PER_PASS = (16_384, 8_192, 4_096)
"""Candidate sizes of a pass; larger sizes are hardly faster."""

FEWEST_SEQUENCES = 8
"""Longest sequences to fit in a server's KV cache at once: a group."""

LARGEST_CLUSTER = 1024
"""Largest cluster in suggestions, in GPUs."""

Place = Literal["separate", "colocated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The available GPUs."""

    gpus: int
    """Number of GPUs."""
    per_node: int = 8
    """GPUs of a machine."""
    memory: float = 80 * GIB
    """Bytes of a GPU."""
    card: str | None = None
    """Name of the GPU, if known."""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.gpus // self.per_node)

    @property
    def usable(self) -> float:
        """Bytes of a GPU for tensors."""
        return self.memory * (1 - SLACK) - RUNTIME


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Placement of trainer and servers, and the memory of both."""

    place: Place
    """Whether the servers have their own GPUs."""
    ranks: int
    """Trainer ranks, each with a GPU."""
    replicas: int
    """Servers."""
    tp_size: int
    """GPUs of a server."""
    share: float
    """``mem_fraction_static`` of a server."""
    tokens_per_pass: int
    """``max_tokens_per_pass``."""
    work: Workload
    """The run."""
    cluster: Cluster
    """The GPUs."""
    trainer: TrainerMemory
    """Memory of a trainer's GPU."""
    server: ServerMemory
    """Memory of a server's GPU."""

    @property
    def sequences(self) -> int:
        """Longest sequences on all servers at once."""
        return self.replicas * (self.server.tokens // self.work.sequence)

    @property
    def margin(self) -> float:
        """Free bytes of a trainer's GPU at its peak, beside the reserve."""
        beside = 0.0
        usable = self.cluster.usable
        if self.place == "colocated":
            # A sleeping server keeps its runtime, and its weights beside an adapter.
            remaining = self.server.weights if self.work.lora is not None else 0.0
            beside = RUNTIME + remaining
        return usable - beside - self.trainer.peak

    @property
    def unused(self) -> int:
        """Idle GPUs."""
        servers = self.replicas * self.tp_size
        busy = max(self.ranks, servers) if self.place == "colocated" else None
        return self.cluster.gpus - (self.ranks + servers if busy is None else busy)

    @property
    def spans_nodes(self) -> bool:
        """Whether the run has GPUs on several machines."""
        return self.cluster.nodes > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingFits:
    """Reasons why there is no arrangement, and alternatives."""

    reasons: tuple[str, ...]
    """Reasons, in sentences."""
    remedies: tuple[str, ...]
    """Alternatives, in sentences."""


def arrange(
    shape: Shape,
    cluster: Cluster,
    work: Workload,
    *,
    tokens: int | None = None,
    tp_size: int | None = None,
    place: Place | None = None,
) -> Arrangement | NothingFits:
    """Returns the best arrangement, or why there is none.

    Servers with their own GPUs come first, as they generate while the trainer trains;
    else they share the trainer's. A server has the fewest GPUs with which all servers
    together hold a batch of the longest responses, as more servers of fewer GPUs
    generate more; or else the number with room for most of them. ``tokens`` is
    ``max_tokens_per_pass``; an argument of ``None`` is free.
    """
    if (best := _best(shape, cluster, work, tokens, tp_size, place)) is not None:
        return best
    if (wish := _impossible(shape, cluster, tp_size, place)) is not None:
        return wish
    return NothingFits(
        reasons=_reasons(shape, cluster, work),
        remedies=tuple(_remedies(shape, cluster, work)),
    )


def _best(
    shape: Shape,
    cluster: Cluster,
    work: Workload,
    tokens: int | None = None,
    tp_size: int | None = None,
    place: Place | None = None,
) -> Arrangement | None:
    """Returns the best fitting arrangement."""
    sizes = (tokens,) if tokens else TOKENS_PER_PASS
    separate = (
        _separate(shape, cluster, work, ranks, size, tp_size)
        for ranks in _rank_numbers(cluster, work, sizes[0])
        for size in sizes
    )
    shared = (_colocated(shape, cluster, work, size, tp_size) for size in sizes)
    options = chain(
        separate if place != "colocated" else (),
        shared if place != "separate" and cluster.nodes == 1 else (),
    )
    return next((option for option in options if option is not None), None)


def _rank_numbers(cluster: Cluster, work: Workload, tokens: int) -> list[int]:
    """Returns numbers of trainer ranks, the best first.

    Half of the GPUs, as both sides took about the same time in measurements; but no
    more than have a full pass of each batch. Then more, for their memory, then fewer.
    On several machines, trainer and servers have whole machines.
    """
    unit = cluster.per_node if cluster.nodes > 1 else 1
    powers = [unit * 2**n for n in range(11) if unit * 2**n < cluster.gpus]
    busy = work.responses * work.sequence // tokens
    target = max(min(cluster.gpus // 2, busy, work.responses), 1)
    powers = [n for n in powers if n <= work.responses]
    lower = [n for n in powers if n <= target]
    higher = [n for n in powers if n > target]
    return [*lower[-1:], *higher, *lower[-2::-1]]


def _separate(
    shape: Shape,
    cluster: Cluster,
    work: Workload,
    ranks: int,
    tokens: int,
    tp: int | None,
) -> Arrangement | None:
    """Returns the arrangement with servers on their own GPUs, if it fits."""
    trainer = trainer_memory(shape, work, ranks=ranks, tokens=tokens)
    if trainer.peak > cluster.usable:
        return None
    free = cluster.gpus - ranks
    sizes = _tp_sizes(shape, min(free, cluster.per_node), tp)
    side = {"place": "separate", "ranks": ranks, "trainer": trainer}
    shares = dict.fromkeys(sizes, SERVER_SHARE)
    return _roomy(shape, cluster, work, free, shares, tokens_per_pass=tokens, **side)


def _colocated(
    shape: Shape, cluster: Cluster, work: Workload, tokens: int, tp: int | None
) -> Arrangement | None:
    """Returns the arrangement with servers on the trainer's GPUs, if it fits."""
    ranks = min(cluster.gpus, work.responses)
    trainer = trainer_memory(shape, work, ranks=ranks, tokens=tokens)
    side = {"place": "colocated", "ranks": ranks, "trainer": trainer}
    shares = {
        size: colocated_share(shape, cluster, work, trainer, tp_size=size)
        for size in _tp_sizes(shape, ranks, tp)
    }
    return _roomy(shape, cluster, work, ranks, shares, tokens_per_pass=tokens, **side)


def _roomy(
    shape: Shape,
    cluster: Cluster,
    work: Workload,
    free: int,
    shares: Mapping[int, float],
    **side: Any,
) -> Arrangement | None:
    """Returns the arrangement with the smallest servers that hold a whole batch.

    Or else the one that holds most. ``free`` GPUs are for servers, ``shares`` are those
    of a GPU by the size of a server, and ``side`` is the trainer's.
    """
    # A server's GPUs are on the same machine.
    nodes, extra = divmod(free, cluster.per_node)
    options = [
        Arrangement(
            replicas=nodes * (cluster.per_node // size) + extra // size,
            tp_size=size,
            share=share,
            server=server_memory(
                shape, tp_size=size, memory=cluster.memory, share=share
            ),
            cluster=cluster,
            work=work,
            **side,
        )
        for size, share in shares.items()
    ]
    fitting = [option for option in options if _holds_a_group(option.server, work)]
    largest = max(fitting, key=lambda option: option.sequences, default=None)
    return next((o for o in fitting if o.sequences >= work.responses), largest)


def colocated_share(
    shape: Shape,
    cluster: Cluster,
    work: Workload,
    trainer: TrainerMemory,
    *,
    tp_size: int,
) -> float:
    """Returns the share of a GPU for a server beside a trainer; 0 if there is none.

    Three moments must fit. During training, the server sleeps: it keeps nothing, or its
    weights if an adapter is trained. After its wake-up, weights and optimizer of the
    trainer remain. When the trainer loads its model, the server is already running.
    """
    # A sleeping server has its own runtime, too.
    usable = cluster.usable - RUNTIME
    asleep = HALF * shape.parameters / tp_size if work.lora is not None else 0.0
    if asleep + trainer.peaks["training"] > usable:
        return 0.0
    if asleep + trainer.peaks["stepping"] > usable:
        return 0.0
    beside = max(trainer.peaks["updating"], trainer.peaks["loading"])
    share = min((usable - beside) / cluster.memory, LARGEST_COLOCATED_SHARE)
    return max(round(share // SHARE_STEP * SHARE_STEP, 2), 0.0)


def _tp_sizes(shape: Shape, most: int, given: int | None) -> list[int]:
    sizes = [given] if given else [2**n for n in range(11)]
    return [n for n in sizes if n <= most and shape.heads % n == 0]


def _holds_a_group(server: ServerMemory, work: Workload) -> bool:
    return server.tokens >= min(work.group_size, FEWEST_SEQUENCES) * work.sequence


def _impossible(
    shape: Shape, cluster: Cluster, tp_size: int | None, place: Place | None
) -> NothingFits | None:
    """Returns why a wish is impossible with any memory."""
    reason = None
    if tp_size is not None and shape.heads % tp_size:
        reason = f"tp_size={tp_size} does not divide {shape.heads} heads."
    elif tp_size is not None and tp_size > min(cluster.gpus, cluster.per_node):
        reason = f"No machine has the tp_size={tp_size} GPUs of a server."
    remedy = "Another --tp-size, or none: the fewest GPUs that fit."
    if reason is None and place == "colocated" and cluster.nodes > 1:
        reason = (
            f"Servers share the trainer's GPUs on one machine, and these are on "
            f"{cluster.nodes}."
        )
        remedy = "--place separate, or the GPUs of one machine."
    return NothingFits(reasons=(reason,), remedies=(remedy,)) if reason else None


def _reasons(shape: Shape, cluster: Cluster, work: Workload) -> tuple[str, ...]:
    """Returns the excessive sizes for these GPUs, in any arrangement."""
    usable = cluster.usable / GIB
    ranks = min(cluster.gpus, work.responses)
    trainer = trainer_memory(shape, work, ranks=ranks, tokens=TOKENS_PER_PASS[-1])
    reasons = []
    if work.responses < cluster.gpus:
        reasons.append(
            f"A batch of {work.responses} can be shared by as many GPUs of the trainer "
            f"at most, and there are {cluster.gpus}."
        )
    for phase, size in trainer.peaks.items():
        if size > cluster.usable:
            reasons.append(
                f"The trainer needs {ranks} x {size / GIB:.1f} GiB for {phase}, and "
                f"{usable:.1f} GiB of a GPU can be used."
            )
    size = max(_tp_sizes(shape, min(cluster.gpus, cluster.per_node), None), default=1)
    server = server_memory(
        shape, tp_size=size, memory=cluster.memory, share=SERVER_SHARE
    )
    if not _holds_a_group(server, work):
        reasons.append(
            f"A server of {size} GPUs has {server.weights / GIB:.1f} GiB of weights on "
            f"each, and its KV cache holds {server.tokens} tokens, less than a group "
            f"of responses."
        )
    fitting = "Trainer and servers fit one by one, and not beside each other."
    return tuple(reasons) or (fitting,)


def _where(found: Arrangement) -> str:
    return "the same ones" if found.place == "colocated" else "others"


def _remedies(shape: Shape, cluster: Cluster, work: Workload) -> Iterator[str]:
    """Yields fitting alternatives, the smallest change first."""
    if work.lora is None:
        adapter = replace(work, lora=16, reference=False)
        if _best(shape, cluster, adapter) is not None:
            yield "An adapter of rank 16 (--lora 16) fits these GPUs."
    half = work.sequence // 2
    shorter = replace(work, sequence=half)
    if half > work.prompt_tokens and _best(shape, cluster, shorter) is not None:
        yield f"Sequences of {half} tokens fit these GPUs."
    wider = replace(work, groups_per_batch=-(-cluster.gpus // work.group_size))
    # A rank of the trainer has a response of each batch, or more.
    if work.responses < cluster.gpus and (best := _best(shape, cluster, wider)):
        yield (
            f"Batches of {wider.responses} responses (--groups-per-batch "
            f"{wider.groups_per_batch}) fit these GPUs, as up to {best.ranks} of "
            f"them share the trainer's memory."
        )
        return
    gpus = cluster.gpus
    while gpus < LARGEST_CLUSTER:
        gpus *= 2
        if best := _best(shape, replace(cluster, gpus=gpus), work):
            yield (
                f"{gpus} GPUs of this kind would do: {best.ranks} for the trainer "
                f"and {best.replicas * best.tp_size} for servers, {_where(best)}."
            )
            return
    yield (
        f"No number of these GPUs would do, up to {LARGEST_CLUSTER}: take GPUs with "
        f"more memory, larger batches, shorter sequences, or a smaller model."
    )

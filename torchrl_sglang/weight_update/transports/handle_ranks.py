"""Ranks of a trainer make the handles of one update together.

A server opens the memory of the rank on its own GPU. So each rank gathers the tensors
of a bucket, and makes handles of its own copy; the first rank sends all handles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchrl_sglang.errors import WeightTransferError
from torchrl_sglang.types import ServerPlacement
from torchrl_sglang.weight_update.ranks import Ranks
from torchrl_sglang.weight_update.transports.handles import Content, content_of, pack
from torchrl_sglang.weight_update.transports.placement import is_one_of
from torchrl_sglang.weight_update.weights import (
    Bucket,
    NamedTensors,
    Weights,
    read_buckets,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlePlan:
    """Plan by which all ranks make handles of the same buckets."""

    bucket_bytes: int
    """Most bytes of a bucket."""
    apart: bool
    """Whether a server needs a handle for each tensor of a bucket."""
    owners: tuple[int, ...]
    """The trainer's rank that makes the handles of each rank of each server."""

    def take_part(self, weights: Weights, ranks: Ranks) -> None:
        """Makes handles in each turn of the first rank.

        Memory that servers may still copy is kept; after a failure until the next
        update.
        """
        held: deque[Content] = deque()
        device = weights.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        buckets = read_buckets(weights, self.bucket_bytes)
        while ranks.has_turn():
            # Servers have copied all but the latest.
            while len(held) > 1:
                held.popleft()
            item = next(buckets, None)
            if item is None:
                continue
            content, _ = _exchange(item, self, ranks, device)
            del item
            if content is not None:
                held.append(content)
            del content
        if isinstance(ranks.outcome, BaseException):
            ranks.kept = list(held)


def assign(
    servers: Sequence[ServerPlacement],
    tp_size: int,
    ranks: Sequence[frozenset[str]],
) -> tuple[tuple[int, ...], bool]:
    """Assigns a rank of the trainer to each rank of each server. Pure.

    A rank on the same GPU, else on a GPU that the server sees, else the first one.
    Several ranks on one GPU take turns.

    Args:
        servers: in the order of requests.
        tp_size: ranks of each server.
        ranks: names of the GPU of each rank of the trainer.

    Returns:
        The position in ``ranks`` for each rank of each server, and whether all of these
        are on the same GPU.

    Examples:
        >>> server = ServerPlacement(
        ...     url="", local=True, device="cuda", gpus=("1", "0")
        ... )
        >>> assign([server], 2, [frozenset({"0"}), frozenset({"1"})])
        ((1, 0), True)
    """
    counts: Counter[int] = Counter()
    owners: list[int] = []
    all_near = True
    for server in servers:
        gpus = server.gpus or ()
        for number in range(tp_size):
            gpu = gpus[number : number + 1] if len(gpus) == tp_size else ()
            neighbours = _on(gpu, ranks)
            all_near = all_near and bool(neighbours)
            candidates = neighbours or _on(server.visible_gpus or (), ranks) or [0]
            owner = min(candidates, key=lambda rank: (counts[rank], rank))
            counts[owner] += 1
            owners.append(owner)
    return tuple(owners), all_near


def _on(gpus: Sequence[str], ranks: Sequence[frozenset[str]]) -> list[int]:
    """Returns the ranks that are on one of some GPUs."""
    return [
        rank
        for rank, names in enumerate(ranks)
        if any(is_one_of(gpu, names) for gpu in gpus)
    ]


def lead(weights: Weights, plan: HandlePlan, device: torch.device) -> Iterator[Content]:
    """Yields the content of each request, with the entries of all ranks.

    Called on the first rank, while the others :meth:`HandlePlan.take_part`. When the
    next one is asked for, servers have copied all but the latest.
    """
    ranks: Ranks = weights.ranks
    ranks.begin(plan)
    buckets = read_buckets(weights, plan.bucket_bytes)
    while True:
        ranks.begin_turn()
        item = next(buckets, None)
        if item is None:
            return
        content, problem = _exchange(item, plan, ranks, device)
        del item
        if content is None:
            raise WeightTransferError(problem)
        yield content
        del content


def _exchange(
    item: tuple[Bucket, NamedTensors],
    plan: HandlePlan,
    ranks: Ranks,
    device: torch.device,
) -> tuple[Content | None, str]:
    """Exchanges the handles of a bucket; returns its content, or the problem."""
    texts: dict[int, str] = {}
    content: Content | None = None
    problem = ""
    try:
        content = content_of(*item, device, apart=plan.apart)
        if device.type == "cuda":
            # A server reads as soon as it has the handle.
            torch.cuda.current_stream(device).synchronize()
        for entry, owner in enumerate(plan.owners):
            if owner == ranks.position:
                # A handle is opened by one rank of one server.
                texts[entry], aliases = pack(content.value)
                content.aliases += aliases
    except Exception as error:  # noqa: BLE001 - Raised on the first rank.
        problem = f"Rank {ranks.position} of the trainer has no handles: {error}"
    messages = ranks.exchange((texts, problem))
    problem = " ".join(problem for _, problem in messages if problem)
    if problem or content is None:
        return None, problem
    entries = {entry: text for texts, _ in messages for entry, text in texts.items()}
    content.entries = [entries[entry] for entry in range(len(plan.owners))]
    return content, ""

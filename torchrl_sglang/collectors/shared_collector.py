"""SharedCollector: one collector for several ranks of a trainer, each with a share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.collectors.packed_rows import Packed, pack, unpack
from torchrl_sglang.collectors.weight_sync import attach_weight_sync
from torchrl_sglang.errors import CollectionError, ConfigurationError, SGLangError
from torchrl_sglang.objectives.tree import node_values, sorted_rows, spread_tree
from torchrl_sglang.requests.token_columns import ASSISTANT_MASK, TOKENS
from torchrl_sglang.support.checks import check_seconds
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

Share: TypeAlias = Callable[[Sequence[TensorDictBase], int], list[list[TensorDictBase]]]
"""Deals the rows of a batch to a number of ranks."""


class SharedCollector:
    """One collector for several ranks of a trainer, as under ``torchrun``.

    The first rank collects. Each iteration yields every rank its share of a batch:
    whole responses, with about the same number of tokens to train on. Advantages that
    compare the responses of a group are computed before the batch is shared, by
    ``prepare``. All ranks make the same calls in the same order.

    Args:
        make_collector (callable): makes the collector; called on the first rank only.
            Its error is raised on all ranks. ``None`` is allowed on the others.

    Keyword Args:
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``, on each rank, for
            :meth:`update_policy_weights_`. The servers need to be reached by the first
            rank alone.
        prepare (callable, optional): is called with each batch on the first rank, and
            returns what is shared.
        share (callable): deals the rows of a batch to a number of ranks, at least one
            row to each. Defaults to :func:`.share_rows`; with ``packing="tree"``,
            :func:`.share_trees` leaves rows with a common prefix on one rank.
        process_group (ProcessGroup, optional): the ranks. Defaults to all.
        timeout (float): how long a rank waits for the others, in seconds, which
            includes their work between two calls. Defaults to 7200.

    Raises:
        ConfigurationError: if ``torch.distributed`` is not initialised, or an argument
            is wrong.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("cpu:gloo,cuda:nccl")  # doctest: +SKIP
        >>> advantage = GroupAdvantage(group_size=8)
        >>> collector = SharedCollector(  # doctest: +SKIP
        ...     lambda: AsyncLLMCollector(
        ...         policy=SGLangWrapper(engine),
        ...         prompts=["1+1=", "2+2="],
        ...         rewards=lambda conversation, task: float(len(conversation.turns)),
        ...         group_size=8,
        ...         groups_per_batch=2,
        ...     ),
        ...     weight_sync_schemes={"policy": SGLangWeightSyncScheme(url)},
        ...     prepare=advantage,
        ... )
        >>> for share in collector:  # doctest: +SKIP
        ...     loss.accumulate(share.split(4), process_group=dist.group.WORLD)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     collector.update_policy_weights_(model)
    """

    last_sync_report: SyncReport | None = None
    """Report of the last weight update; ``None`` before the first."""

    def __init__(
        self,
        make_collector: Callable[[], Any] | None,
        *,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        share: Share | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 7200.0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigurationError(
                "A SharedCollector needs the ranks of a trainer: call "
                "torch.distributed.init_process_group() first, under torchrun."
            )
        self._ranks = _RankGroup(process_group, check_seconds("timeout", timeout))
        self._prepare = prepare
        self._share = share or share_rows
        self._has_shared = False
        self._schemes = dict(weight_sync_schemes or {})
        self.collector: Any = None
        """The collector, on the first rank; ``None`` on the others."""
        self.policy_version = 0
        """Number of weight updates so far, on all ranks."""

        def make() -> int:
            if make_collector is None:
                raise ConfigurationError(
                    "make_collector is None on the first rank, which collects."
                )
            self.collector = make_collector()
            for scheme in self._schemes.values():
                attach_weight_sync(self.collector, scheme)
            return int(self.collector.policy_version)

        try:
            self.policy_version = self._ranks.first(make)
        except BaseException:
            self.shutdown()
            raise

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields this rank's share of each batch, until the collector ends on all.

        Raises:
            CollectionError: if the collector failed on the first rank, with its text,
                or another rank was lost.
            ConfigurationError: if the first batch has fewer responses than there are
                ranks. A later one, such as the rest of an epoch, is left out with a
                warning.
        """
        batches = self._batches()
        while True:
            share = self._ranks.scatter(lambda: self._next(batches))
            if share is None:
                return
            self.policy_version = share[0]
            yield share[1]

    def _batches(self) -> Iterator[Any]:
        yield from self.collector

    def _next(self, batches: Iterator[Any]) -> list[tuple[int, TensorDictBase]] | None:
        """Returns the share of each rank; ``None`` after the last batch."""
        size = self._ranks.size
        batch = next(batches, None)
        while self._has_shared and batch is not None and batch.numel() < size:
            torchrl_logger.warning(
                f"A batch of {batch.numel()} responses is left out: {size} ranks "
                f"cannot share it."
            )
            batch = next(batches, None)
        if batch is None:
            return None
        self._has_shared = True
        if self._prepare is not None:
            batch = self._prepare(batch)
        rows = list(batch.reshape(-1).unbind(0))
        version = int(self.collector.policy_version)
        return [
            (version, LazyStackedTensorDict(*share))
            for share in self._share(rows, size)
        ]

    def update_policy_weights_(self, weights: Any = None) -> SyncReport:
        """Sends weights to the servers; all ranks call it.

        Weights that are spread over the ranks (FSDP2) are gathered bucket by bucket;
        for others the first rank's are sent.

        Args:
            weights: as for :meth:`.SGLangWeightSender.update_weights`. Defaults to the
                model that is registered with this rank's scheme.

        Returns:
            The report of the first rank, on all ranks.

        Raises:
            ConfigurationError: if there is no scheme.
            SGLangError: of the first rank, on all ranks.
        """
        if "policy" not in self._schemes:
            raise ConfigurationError(
                "There is no scheme that could send weights; give weight_sync_schemes="
                "{'policy': scheme} on each rank."
            )
        sender = self._schemes["policy"].create_sender()

        reports: list[SyncReport] = []

        def send() -> None:
            if self._ranks.is_first:
                reports.append(self.collector.update_policy_weights_(weights))
            else:
                sender.update_weights(weights)

        def finish() -> tuple[SyncReport, int]:
            if not spread:
                send()
            return reports[0], int(self.collector.policy_version)

        # Errors are found before any rank waits in a collective.
        self._ranks.all(lambda: sender.resolve(weights))
        self._ranks.first(self._check)
        spread = self._ranks.first(lambda: sender.is_spread(weights))
        if spread:
            self._ranks.all(send)
        report: SyncReport
        report, self.policy_version = self._ranks.first(finish)
        self.last_sync_report = report
        return report

    def _check(self) -> None:
        check = getattr(self.collector, "check", None)
        if check is not None:
            check()

    def state_dict(self) -> dict[str, Any]:
        """Returns the collector's state; empty on other ranks than the first."""
        return self.collector.state_dict() if self._ranks.is_first else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from the first rank's state; all ranks call it."""

        def load() -> int:
            self.collector.load_state_dict(state_dict)
            # A collector of the user's own may not count its batches.
            self._has_shared = bool(state_dict.get("batches"))
            return int(self.collector.policy_version)

        self.policy_version = self._ranks.first(load)

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the collector, on the first rank, and the connections of the ranks.

        A rank that waits for this one fails.
        """
        try:
            if self.collector is not None:
                self.collector.shutdown(timeout=timeout)
        finally:
            self._ranks.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def share_rows(
    rows: Sequence[TensorDictBase], count: int
) -> list[list[TensorDictBase]]:
    """Shares responses among ranks, with about as many tokens to train on each. Pure.

    The largest ones are dealt first, each to the rank with the fewest tokens; a rank
    keeps the order of the batch.
    """
    _check_enough(rows, count)
    sizes = [_num_tokens(row) for row in rows]
    owned: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    order = sorted(range(len(rows)), key=lambda index: -sizes[index])
    for index in order:
        # Of ranks with equal numbers of tokens, that with the fewest responses.
        rank = min(range(count), key=lambda r: (totals[r], len(owned[r])))
        owned[rank].append(index)
        totals[rank] += sizes[index]
    return [[rows[index] for index in sorted(own)] for own in owned]


def share_trees(
    rows: Sequence[TensorDictBase], count: int
) -> list[list[TensorDictBase]]:
    """Shares responses among ranks, with about as many distinct tokens on each. Pure.

    Responses that share most of their tokens are on the same rank, and each rank has
    one to train on where there are enough.
    """
    _check_enough(rows, count)
    trained = [index for index, row in enumerate(rows) if _num_tokens(row)]
    if len(trained) < count:
        return share_rows(rows, count)
    tokens = [rows[index][TOKENS] for index in trained]
    order = sorted_rows([node_values(ids, None).cpu().numpy() for ids in tokens])
    groups = spread_tree(order, [len(ids) for ids in tokens], count)
    shares = [[trained[place] for place in group] for group in groups]
    shares[0] += set(range(len(rows))).difference(trained)
    return [[rows[index] for index in sorted(share)] for share in shares]


def _check_enough(rows: Sequence[TensorDictBase], count: int) -> None:
    if len(rows) < count:
        raise ConfigurationError(
            f"A batch of {len(rows)} responses cannot be shared by {count} ranks; "
            f"collect larger batches, or train on fewer ranks."
        )


def _num_tokens(row: TensorDictBase) -> int:
    mask = row.get(ASSISTANT_MASK, None)
    if mask is None:
        tokens = row.get(("tokens", "response"), None)
        return 1 if tokens is None else len(tokens)
    return int(mask.sum())


class _RankGroup:
    """Messages of the first rank to the others, over a process group of their own.

    Gloo's: a rank may wait for hours here, and NCCL would take a GPU's time for it.
    """

    def __init__(self, group: dist.ProcessGroup | None, seconds: float) -> None:
        members = None if group is None else dist.get_process_group_ranks(group)
        self._group = dist.new_group(
            members, timeout=timedelta(seconds=seconds), backend="gloo"
        )
        self._open = True
        self._seconds = seconds
        self.size = dist.get_world_size(self._group)
        self.is_first = dist.get_rank(self._group) == 0

    def end(self) -> None:
        """Closes the connections; without effect the second time."""
        if self._open and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._open = False

    def first(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call on the first rank, or raises its error."""
        outcome, error = self._outcome(call)
        values = [(outcome, _portable(error))]
        self._guard(
            lambda: dist.broadcast_object_list(values, group_src=0, group=self._group)
        )
        if error is not None:
            raise error
        outcome, text = values[0]
        if text is not None:
            raise text
        return outcome

    def all(self, call: Callable[[], Any]) -> None:
        """Makes a call on each rank; if one of them fails, all raise."""
        problem = None
        try:
            call()
        except Exception as error:  # noqa: BLE001 - The other ranks raise it.
            problem = error
        problems: list[Any] = [None] * self.size
        self._guard(
            lambda: dist.all_gather_object(
                problems, _portable(problem), group=self._group
            )
        )
        for failure in (problem, *problems):
            if failure is not None:
                raise failure

    def scatter(self, call: Callable[[], list[Any] | None]) -> Any:
        """Returns this rank's part of the result of a call on the first rank.

        The first rank's own part stays as it is.
        """

        def make() -> tuple[Any, list[Packed]] | None:
            parts = call()
            if parts is None:
                return None
            # What cannot be pickled fails here, before the other ranks wait for it.
            return parts[0], [pack(part) for part in parts[1:]]

        packed, error = self._outcome(make)
        first_part, packed_parts = packed or (None, [])
        heads: list[Any] = [(None, _portable(error))] * self.size
        heads[1:] = [
            ((start, len(part)), None) for start, part in packed_parts
        ] or heads[1:]
        received: list[Any] = [None]
        self._guard(
            lambda: dist.scatter_object_list(
                received, heads, group_src=0, group=self._group
            )
        )
        if error is not None:
            raise error
        if self.is_first:
            for rank, (_, content) in enumerate(packed_parts, 1):
                part = torch.from_numpy(content)
                send = partial(dist.send, part, group_dst=rank, group=self._group)
                self._guard(send)
            return first_part
        head, text = received[0]
        if text is not None:
            raise text
        if head is None:
            return None
        start, size = head
        content = torch.empty(size, dtype=torch.uint8)
        self._guard(lambda: dist.recv(content, group_src=0, group=self._group))
        return unpack((start, content.numpy()))

    def _outcome(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        if not self.is_first:
            return None, None
        try:
            return call(), None
        except Exception as error:  # noqa: BLE001 - The other ranks raise it.
            return None, error

    def _guard(self, call: Callable[[], Any]) -> None:
        if not self._open:
            raise CollectionError("The collector was shut down; make another one.")
        try:
            call()
        except (RuntimeError, ValueError) as error:
            raise CollectionError(
                f"A rank of the trainer was lost, or did not come within "
                f"{self._seconds:g} s: {error}"
            ) from error


def _portable(error: Exception | None) -> Exception | None:
    """Returns an error as other ranks raise it."""
    if error is None or (isinstance(error, SGLangError) and _pickles(error)):
        return error
    return CollectionError(
        f"The rank that collects failed: {type(error).__name__}: {error}"
    )


def _pickles(error: SGLangError) -> bool:
    """Returns whether an error can be sent to other ranks."""
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001 - A class of the user's own.
        return False
    return True

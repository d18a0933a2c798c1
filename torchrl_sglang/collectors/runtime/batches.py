"""Takes groups from a collection, as batches or into a replay buffer."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.collectors.options import OnOtherSender
from torchrl_sglang.collectors.runtime.advantages import check_advantages
from torchrl_sglang.collectors.runtime.collection import Collection, Complete
from torchrl_sglang.collectors.runtime.consumer_version import ConsumerVersion
from torchrl_sglang.collectors.runtime.stale_mask import StaleMask
from torchrl_sglang.collectors.scheduling.group_pool import ReadyGroup
from torchrl_sglang.errors import (
    CollectionError,
    UserFunctionError,
    WeightSyncStateError,
)
from torchrl_sglang.support.log import torchrl_logger


class Batches:
    """Makes batches of complete groups.

    Without ``mask_stale``, groups with tokens that are too old are not taken.
    """

    def __init__(
        self,
        collection: Collection,
        consumer_version: ConsumerVersion,
        *,
        mask_stale: StaleMask | None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        replay_buffer: Any,
        on_other_sender: OnOtherSender = "warn",
        servers: str = "",
    ) -> None:
        self.frames = 0
        self.batches = 0
        self._collection = collection
        self._consumer_version = consumer_version
        self._mask_stale = mask_stale
        self._postproc = postproc
        self._replay_buffer = replay_buffer
        self._on_other_sender = on_other_sender
        self._servers = servers
        self._warned = False
        self._writer: threading.Thread | None = None

    @property
    def writing(self) -> bool:
        """Whether groups are written in the background."""
        return self._writer is not None and self._writer.is_alive()

    def next(
        self,
        size: int,
        *,
        timeout: float,
        demand: bool = True,
        on_wait: Callable[[], object] | None = None,
    ) -> TensorDictBase | None:
        """Returns a batch, which a buffer also has; ``None`` at the end."""
        groups = self._collection.take(
            size, timeout=timeout, demand=demand, on_wait=on_wait
        )
        if not groups:
            return None
        self._check_senders(groups)
        pool = self._collection.pool
        bound = pool.version - pool.limits.max_staleness
        rows: list[TensorDictBase] = []
        for group in groups:
            complete = group.content
            if self._mask_stale is not None and group.oldest < bound:
                for row in complete.rows:
                    self._mask_stale(row, bound)
            rows += complete.rows
        if not self.batches:
            size = self._collection.groups.size
            check_advantages(self._postproc, self._replay_buffer, rows[0], size)
        batch: TensorDictBase = LazyStackedTensorDict(*rows, stack_dim=0)
        if self._postproc is not None:
            batch = self._postproc(batch)
            if batch is None or inspect.isawaitable(batch):
                returned = "None" if batch is None else "a coroutine"
                if inspect.iscoroutine(batch):
                    batch.close()
                raise UserFunctionError(
                    f"postproc returned {returned}, and the batch is what it returns; "
                    f"return it, also where it is changed in place."
                )
        if self._replay_buffer is not None:
            self._consumer_version.set(pool.version)
            self._replay_buffer.extend(batch)
        self._collection.close(groups)
        self.frames += len(rows)
        self.batches += 1
        return batch

    def _check_senders(self, groups: Sequence[ReadyGroup[Complete]]) -> None:
        """Warns once of tokens from another sender's weights, or ends everything."""
        if self._warned:
            return
        foreign = self._collection.groups.foreign
        versions = (foreign(group.content.group) for group in groups)
        version = next(filter(None, versions), None)
        if version is None:
            return
        self._warned = True
        text = (
            f"Batch {self.batches + 1} has tokens of weight version {version!r} from "
            f"the servers at {self._servers}, and the sender of this collector did not "
            f"send it: another trainer updates these servers, too, and each trains on "
            f"tokens of the other's weights. Give each trainer servers of its own; if "
            f"that sender belongs to this run, register the collector with it "
            f"(attach_weight_sync)."
        )
        if self._on_other_sender == "raise":
            error = WeightSyncStateError(
                f"{text} With on_other_sender='warn', which GRPO takes in "
                f"collector={{...}}, the run goes on."
            )
            self._collection.end(error)
            self._collection.check()
        torchrl_logger.warning(f"{text} This is said once.")

    def write_in_background(self) -> None:
        """Starts the thread that writes groups to the buffer, once."""
        if self.writing:
            return
        self._collection.pool.buffered = True
        self._writer = threading.Thread(
            target=self._write, name="torchrl_sglang-writer", daemon=True
        )
        self._writer.start()

    def join(self, timeout: float | None) -> bool:
        """Waits for the writer to end; returns whether it did."""
        writer = self._writer
        if writer is None or writer is threading.current_thread():
            return True
        writer.join(timeout)
        return not writer.is_alive()

    def _write(self) -> None:
        try:
            # A single group, so that its prompts are done as soon as it is written.
            while self.next(1, timeout=math.inf, demand=False) is not None:
                continue
        except CollectionError as error:
            torchrl_logger.error(str(error))
        except BaseException as error:  # noqa: BLE001 - A buffer raises anything.
            torchrl_logger.error(f"A group could not be written: {error!r}")
            self._collection.end(error)

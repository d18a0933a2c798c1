"""The base class of weight transports: the seam between the session and the bytes."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.support.checks import check_choice, check_count, check_seconds
from torchrl_sglang.types import DraftUpdate, WeightLoader
from torchrl_sglang.weight_update.weights import Weights

BUCKET_BYTES = 2 << 30
"""Default size of a bucket: a request takes a server some milliseconds, and a link of
370 GB/s six for this much."""

SEND_TIMEOUT_SECONDS = 300.0

UNPROVEN = "unproven"
"""Weight version of new servers until their values were compared with other servers',
which have these weights under the version that both get then."""

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Options of every transport; each adds its own in a subclass."""

    bucket_bytes: int = BUCKET_BYTES
    """Size of a transfer, in bytes."""
    send_timeout: float = SEND_TIMEOUT_SECONDS
    """Timeout of one transfer, in seconds."""
    weight_loader: str = "auto"
    """``"sglang"``, ``"traced"``, or ``"auto"``: the one that the servers have."""
    draft: DraftUpdate = "auto"
    """What happens to a draft model of the servers."""

    def __post_init__(self) -> None:
        self._set("bucket_bytes", check_count("bucket_bytes", self.bucket_bytes))
        self._set("send_timeout", check_seconds("send_timeout", self.send_timeout))
        loaders = ("auto", *get_args(WeightLoader))
        check_choice("weight_loader", self.weight_loader, loaders)
        check_choice("draft", self.draft, get_args(DraftUpdate))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


class WeightTransport(session.Transfer):
    """Carries weights to every server of an engine.

    ``session.py`` pauses, flushes and resumes. No call may hang: each has a timeout,
    and a collective runs where it can be abandoned. ``name`` is also the name in
    ``SGLangWeightSyncScheme(transport=...)``.
    """

    options_type: ClassVar[type[TransportOptions]] = TransportOptions
    """Type of the options, which are arguments of the scheme."""
    traceable: ClassVar[bool] = False
    """Whether servers with ``weight_loader="traced"`` load what it sends by copies."""
    trainer_gpus: tuple[frozenset[str], ...] = ()
    """Names of the GPU of each rank that holds the weights, if several do."""

    def __init__(
        self, engine: RLSGLangEngine, options: Any = None, *, device: torch.device = CPU
    ) -> None:
        self._engine = engine
        self._options: Any = options or self.options_type()
        self.draft = self._options.draft
        # Where buckets are put together.
        self._device = device

    def _refuse_stages(self) -> None:
        """Refuses servers that take weights from files only."""
        pp_size = self._engine.capabilities.pp_size
        dp_size = self._engine.capabilities.dp_size
        if pp_size > 1 or dp_size > 1:
            raise UnsupportedByServerError(
                f"SGLang receives tensors with pp_size=1 and dp_size=1 only, and the "
                f"server has pp_size={pp_size}, dp_size={dp_size}; use "
                f"transport='disk', or several servers (num_replicas) for dp_size."
            )

    @abc.abstractmethod
    def send(self, weights: Weights, *, version: str) -> int:
        """Makes every server load the weights, and returns the number of transfers.

        They are read once, never more than a bucket ahead.

        Raises:
            WeightTransferError: if that failed; ``untouched`` is True if no server has
                received anything.
        """

    def close(self) -> None:
        """Disconnects from the servers. Safe to call twice; never waits long."""


async def send_to_each(
    urls: Sequence[str],
    call: Callable[[int, str], Awaitable[Any]],
    *,
    refusals: Sequence[str],
    message: str = "",
    grace_seconds: float | None = None,
) -> None:
    """Calls every server, and raises :class:`WeightTransferError` if one fails.

    It is ``untouched`` if all servers refused with one of ``refusals``. Calls end
    ``grace_seconds`` after the first failure; otherwise all are awaited.
    """
    tasks = [asyncio.ensure_future(call(*pair)) for pair in enumerate(urls)]
    until = asyncio.FIRST_EXCEPTION if grace_seconds else asyncio.ALL_COMPLETED
    try:
        _, pending = await asyncio.wait(tasks, return_when=until)
        if pending:
            await asyncio.wait(pending, timeout=grace_seconds)
        errors = [task.exception() if task.done() else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
    for error in errors:
        if error is not None:
            untouched = all(
                isinstance(failure, RequestRefusedError)
                and any(words in str(failure) for words in refusals)
                for failure in errors
            )
            raise WeightTransferError(
                f"{message} {error}".strip(), untouched=untouched
            ) from error

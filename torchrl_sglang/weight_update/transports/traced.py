"""Orders to the traced loader of servers, and its answers.

``backends/launch/loaders/torchrl_sglang_loader.py`` carries them out in the servers. An
order is JSON in the place of a tensor's name. An error in a loader would end its
server, so it is kept there, and asked for after the last order of an update.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    SGLangError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync, submit
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import TRACED_LOADER
from torchrl_sglang.weight_update.transports.handles import Content, memory_of, pack
from torchrl_sglang.weight_update.weights import Bucket, NamedTensors, TensorSpec

QUESTION = TRACED_LOADER.partition(".")[0]
"""Name that ``/get_weights_by_name`` answers with the state of the loader."""

_FACTS = 5
"""Numbers of an answer before its text."""

NUMBER_BITS = 48
"""Bits of a random number that a server's answer has exactly, as a float."""

Value = list[tuple[str, torch.Tensor]]
"""The content of a request."""


def uses_traced_loader(engine: RLSGLangEngine, weight_loader: str) -> bool:
    """Returns whether servers load by traced copies; refuses an impossible choice."""
    capabilities = engine.capabilities
    problem = None
    if not capabilities.has_traced_loader:
        problem = "The servers were not started with weight_loader='traced'."
    elif capabilities.draft is not None:
        problem = "The servers have a draft model, which takes weights as well."
    if problem and weight_loader == "traced":
        raise UnsupportedByServerError(
            f"weight_loader='traced' is not possible. {problem} Nothing was sent; "
            f"leave it out of the scheme, or start the servers with it and without a "
            f"draft model."
        )
    return problem is None and weight_loader != "sglang"


class TracedLoader:
    """Orders to the traced loaders of an engine's servers."""

    def __init__(self, engine: RLSGLangEngine, send_timeout: float) -> None:
        self._engine = engine
        self._send_timeout = send_timeout
        self._timeout = min(send_timeout, CONTROL_TIMEOUT_SECONDS)
        self._update = 0
        self._requests = 0
        self._memory = 0
        # What the servers have open, and what keeps it from being used for others.
        self._addresses: dict[str, int] = {}
        self._sources: list[torch.Tensor] = []
        self._whole: object = None

    @property
    def shares_memory(self) -> bool:
        """Whether servers keep memory open."""
        return bool(self._addresses)

    def begin(self) -> None:
        """Begins an update."""
        self._update, self._requests = 1 + secrets.randbits(NUMBER_BITS), 0

    def order(
        self,
        action: str,
        specs: Iterable[TensorSpec] = (),
        content: torch.Tensor | None = None,
        **fields: Any,
    ) -> Value:
        """Returns the content of a request; see ``ACTIONS`` of the loader."""
        self._requests += 1
        order = {
            "do": action,
            "update": self._update,
            "tensors": _describe(specs),
            **fields,
        }
        empty = torch.empty(0, dtype=torch.uint8)
        return [(json.dumps(order), empty if content is None else content)]

    def receive(
        self, buckets: Sequence[Bucket], group: str, together: bool
    ) -> dict[str, Any]:
        """Returns the fields of a request to receive buckets from a process group.

        A small bucket is one run of bytes; ``together`` starts the broadcasts of each
        other one as one operation.
        """
        value = self.order(
            "receive",
            group=group,
            timeout=self._send_timeout * len(buckets),
            pid=os.getpid(),
            began=process_start(),
            buckets=[
                {
                    "tensors": _describe(bucket.specs),
                    "flat": bucket.small,
                    "num_bytes": bucket.num_bytes,
                    "together": together and not bucket.small,
                }
                for bucket in buckets
            ],
        )
        # It says the same to all ranks of a server.
        texts = [pack(value)[0]] * self._engine.capabilities.tp_size
        return {"serialized_named_tensors": texts, "load_format": TRACED_LOADER}

    def flat(self, specs: tuple[TensorSpec, ...], flat: torch.Tensor) -> Content:
        """Makes the content of tensors in one flat run of bytes."""
        return Content(
            value=self.order("bucket", specs, flat),
            num_tensors=len(specs),
            load_format=TRACED_LOADER,
        )

    def has_open(self, memory: object) -> bool:
        """Returns whether servers have opened all of an update's memory."""
        return memory is not None and memory is self._whole

    def again(self, num_tensors: int) -> Content:
        """Makes the content of an update from the open memory."""
        return Content(
            value=self.order("again", memory=self._memory),
            num_tensors=num_tensors,
            load_format=TRACED_LOADER,
        )

    def memory(
        self,
        specs: list[TensorSpec],
        tensors: NamedTensors,
        *,
        apart: bool,
        whole: object = None,
    ) -> Content:
        """Makes the content of tensors in their own memory on a GPU.

        Servers keep that open, and it stays allocated, until other memory is sent or
        :meth:`forget`: the next update sends no handles. ``whole`` is the memory of an
        update that has only these tensors.
        """
        self._whole = whole
        # Thousands of tensors of experts take milliseconds for each call.
        addresses = {spec.name: tensors[spec.name].data_ptr() for spec in specs}
        if addresses == self._addresses:
            return self.again(len(specs))
        content = Content(value=None, num_tensors=len(specs), load_format=TRACED_LOADER)
        self._sources = [tensors[spec.name].detach() for spec in specs]
        self._addresses = addresses
        self._memory = 1 + secrets.randbits(NUMBER_BITS)
        content.entries = []
        for rank in range(self._engine.get_world_size()):
            # A handle is opened by one rank of one server.
            shared = [memory_of(source) for source in self._sources]
            content.aliases += [alias for _, alias in shared]
            self._requests -= rank > 0
            value = self.order(
                "open",
                specs,
                handles=[handle for handle, _ in shared],
                memory=self._memory,
                apart=apart,
                pid=os.getpid(),
                began=process_start(),
            )
            content.entries.append(pack(value)[0])
        return content

    def check_early(self) -> concurrent.futures.Future[None]:
        """Begins to ask, as :meth:`check` does, while the last order is carried out.

        Servers serve one request after the other, so they answer when they have loaded.
        """
        return submit(self.check())

    def confirm(self, early: concurrent.futures.Future[None]) -> None:
        """Waits for the answers to :meth:`check_early`, and checks again without them.

        The question may have been faster than the order.
        """
        try:
            early.result()
        except SGLangError:
            run_sync(self.check())

    async def check(self) -> None:
        """Asks the servers whether they have loaded the weights.

        Raises:
            WeightTransferError: if one has not.
        """
        control = self._engine.control
        call = control.get_weights_by_name(QUESTION, 1, timeout=self._timeout)
        answers = await call
        open_memory = True
        for url, answer in zip(control.urls, answers, strict=True):
            update, requests, failed, traced, keeps = answer[:_FACTS]
            text = "".join(chr(int(letter)) for letter in answer[_FACTS:])
            if failed or (update, requests) != (self._update, self._requests):
                reason = text or f"{requests:.0f} of {self._requests} requests are done"
                raise WeightTransferError(
                    f"The server at {url} did not load the weights: {reason}."
                )
            if not traced:
                _warn_once(text)
            open_memory = open_memory and bool(keeps)
        if not open_memory:
            self.release()

    def release(self) -> None:
        """Releases memory that servers do not read any more."""
        self._addresses, self._sources, self._whole = {}, [], None

    async def forget(self, timeout: float) -> None:
        """Has servers close the memory that they keep open."""
        if self._addresses:
            name = f"{QUESTION}/forget/{self._memory}"
            self.release()
            await self._engine.control.get_weights_by_name(name, 1, timeout=timeout)

    async def abandon(self, group: str, timeout: float) -> None:
        """Has servers end broadcasts that this sender has given up."""
        name = f"{QUESTION}/abandon/{group}"
        await self._engine.control.get_weights_by_name(name, 1, timeout=timeout)


def _describe(specs: Iterable[TensorSpec]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns tensors' names, types and shapes, for JSON."""
    return [
        (spec.name, str(spec.dtype).removeprefix("torch."), tuple(spec.shape))
        for spec in specs
    ]


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        torchrl_logger.warning(
            f"The servers load weights with the model's own loader, although they "
            f"were started with weight_loader='traced': {reason}"
        )


def process_start() -> str | None:
    """Returns when this process began, as the kernel counts; ``None``: unknown."""
    try:
        # The name in front of it may have spaces.
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None

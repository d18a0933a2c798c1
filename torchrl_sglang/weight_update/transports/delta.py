"""Sends changed elements in plain HTTP requests, for servers that no NCCL reaches.

Servers in another cloud, or a workstation behind a slow link. The sender keeps the
weights that the servers have acknowledged in CPU memory, once for all servers, and
sends what differs: exact bit patterns, with a checksum. A server of which it is not
certain that it holds those weights gets all of them instead.

The servers need the loader of ``torchrl_sglang_delta.py``.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader
from torchrl_sglang.errors import (
    ServerError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync, submit
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.weight_update.transports.base import (
    CPU,
    WeightTransport,
    send_to_each,
)
from torchrl_sglang.weight_update.transports.delta_messages import (
    DeltaState,
    DeltaWriter,
    all_of,
    bits_of,
    changes_of,
)
from torchrl_sglang.weight_update.transports.handles import pack
from torchrl_sglang.weight_update.weights import TensorSpec, Weights, read_buckets

MESSAGE_BYTES = 1 << 25
"""Most bytes of a message before compression. A server reads a request as a whole."""

STATE_SECONDS = 60.0
"""Timeout for a server to say what it holds, for which it reads all its weights."""

_NOTHING_LOADED = ("must run between",)
"""Refusals of a server that has not touched its weights."""


@dataclass(kw_only=True)
class Baseline:
    """The weights that servers have acknowledged, and which ones did."""

    token: str
    """Token of the update that sent them."""
    version: str
    """Version of the weights."""
    bits: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> bit patterns, flat in CPU memory."""
    specs: tuple[TensorSpec, ...] = ()
    """The tensors, in the order in which they were sent."""
    servers: frozenset[str] = frozenset()
    """URLs of the servers that acknowledged all of it."""


def why_full(
    url: str,
    baseline: Baseline | None,
    specs: tuple[TensorSpec, ...],
    state: DeltaState | None,
    versions: tuple[str, str],
) -> str | None:
    """Returns the reason to send a server all weights; None: changes are enough. Pure.

    ``state`` is its loader's, and ``versions`` the weights', by server and engine.
    """
    if baseline is None or url not in baseline.servers:
        return "it has acknowledged no weights of this sender"
    if baseline.specs != specs:
        return "other tensors are sent"
    if state is None or state.outcome != loader.OK or state.token != baseline.token:
        return "it was restarted, or holds the weights of another sender"
    if any(version != baseline.version for version in versions):
        return f"it has weights of version {versions[0]}, and not {baseline.version}"
    if not state.intact:
        return "its weights have changed since they were sent"
    return None


class DeltaTransport(WeightTransport):
    """Sends the elements that changed, in requests to each server."""

    name = "delta"
    route = "tensor"
    in_session = True

    def __init__(
        self, engine: RLSGLangEngine, options: Any = None, *, device: torch.device = CPU
    ) -> None:
        super().__init__(engine, options, device=device)
        self._message_bytes = min(self._options.bucket_bytes, MESSAGE_BYTES)
        self._connected = False
        self._baseline: Baseline | None = None
        self._reason: str | None = None

    @property
    def connected(self) -> bool:
        """Whether the servers are known to have the loader."""
        return self._connected

    def connect(self) -> None:
        """Checks that the servers have the loader; see :class:`.WeightTransport`."""
        self._refuse_stages()
        capabilities = self._engine.capabilities
        if loader.LOADER not in capabilities.weight_loaders:
            raise UnsupportedByServerError(
                f"transport='delta' needs servers that were started with "
                f"custom_weight_loader={loader.LOADER!r}, and these have "
                f"{list(capabilities.weight_loaders)}. Of servers that this package "
                f"does not start, the file torchrl_sglang_delta.py must be on the "
                f"PYTHONPATH."
            )
        updated = {"auto": capabilities.draft == "same", "keep": False}
        if capabilities.draft is not None and updated.get(self.draft, True):
            raise UnsupportedByServerError(
                f"transport='delta' does not see whether a draft model was updated, "
                f"too (draft={self.draft!r}); give draft='keep', or use "
                f"transport='broadcast'."
            )
        self._connected = True

    def send(self, weights: Weights, *, version: str) -> int:
        """Sends changes, or all weights; returns the number of messages."""
        baseline, self._baseline = self._baseline, None
        try:
            lines = self._lines(weights.specs, baseline)
        except ServerError as error:
            raise WeightTransferError(
                f"The servers could not be asked which weights they hold: {error}",
                untouched=True,
            ) from error
        if baseline is None or baseline.specs != weights.specs:
            baseline = Baseline(token="", version="", specs=weights.specs)
        try:
            changed = self._write(weights, lines, baseline)
            for line in lines:
                line.finish()
            self._name_version(version)
        except BaseException as error:
            failure = self._give_up(error, lines)
            if not isinstance(error, Exception):
                raise
            raise failure from error
        baseline.token, baseline.version = lines[0].writer.update, version
        baseline.servers = frozenset(self._engine.control.urls)
        self._baseline = baseline
        self._report(weights, lines, changed)
        return sum(line.writer.number for line in lines)

    def close(self) -> None:
        """Forgets the baseline, so that the next update sends all weights."""
        self._connected = False
        self._baseline = None

    def _lines(
        self, specs: tuple[TensorSpec, ...], baseline: Baseline | None
    ) -> list[DeltaLine]:
        """Groups the servers by the weights that they hold."""
        control, timeout = self._engine.control, STATE_SECONDS
        urls = list(control.urls)
        states = {
            url: DeltaState.read(numbers)
            for url, numbers in run_sync(
                control.loader_states(loader.STATE, timeout=timeout, urls=urls)
            ).items()
        }
        self._check_loaders([url for url in urls if states[url] is None])
        versions = run_sync(control.weight_versions(timeout=timeout, urls=urls))
        served = self._engine.weight_version
        reasons = {
            url: why_full(url, baseline, specs, states[url], (version, served))
            for url, version in zip(urls, versions, strict=True)
        }
        token = secrets.token_hex(loader.TOKEN_BITS // 4)
        lines: list[DeltaLine] = []
        for changes in (True, False):
            group = [url for url in urls if (reasons[url] is None) is changes]
            base = baseline.token if baseline is not None and changes else ""
            writer = DeltaWriter(update=token, base=base, specs=specs)
            if group:
                group_states = filter(None, (states[url] for url in group))
                indivisible = {n for state in group_states for n in state.indivisible}
                lines.append(
                    DeltaLine(
                        transport=self,
                        urls=group,
                        writer=writer,
                        indivisible=indivisible,
                    )
                )
        if baseline is not None:
            for url, reason in reasons.items():
                if reason is not None:
                    torchrl_logger.info(f"{url} is sent all weights: {reason}.")
        return lines

    def _check_loaders(self, urls: list[str]) -> None:
        """Refuses servers without a state that have no loader any more.

        They were started again by someone else, and would end at the first message.
        """
        if not urls:
            return
        control = self._engine.control
        loaders = run_sync(control.weight_loaders(timeout=STATE_SECONDS, urls=urls))
        lacking = [
            url
            for url, names in zip(urls, loaders, strict=True)
            if loader.LOADER not in names
        ]
        if lacking:
            raise WeightTransferError(
                f"{', '.join(lacking)} was started again without "
                f"custom_weight_loader={loader.LOADER!r}, so nothing was sent; start "
                f"it with this, or take it out with engine.remove_servers().",
                untouched=True,
            )

    def _write(
        self, weights: Weights, lines: list[DeltaLine], baseline: Baseline
    ) -> int:
        """Reads the weights once, for all lines; returns how many elements changed."""
        numbers = {spec.name: i for i, spec in enumerate(weights.specs)}
        changed = 0
        for bucket, tensors in read_buckets(weights, self._message_bytes):
            for spec in bucket.specs:
                flat = tensors.pop(spec.name).detach().reshape(-1)
                number = numbers[spec.name]
                changed += self._write_tensor(spec, number, flat, lines, baseline)
                del flat
        return changed

    def _write_tensor(
        self,
        spec: TensorSpec,
        number: int,
        flat: torch.Tensor,
        lines: list[DeltaLine],
        baseline: Baseline,
    ) -> int:
        changed = 0
        if spec.name not in baseline.bits:
            kind = loader.INTEGERS[spec.dtype.itemsize]
            baseline.bits[spec.name] = torch.empty(len(flat), dtype=kind)
        held = baseline.bits[spec.name]
        length = max(self._message_bytes // spec.dtype.itemsize, 1)
        for begin in range(0, max(len(flat), 1), length):
            bits = bits_of(flat[begin : begin + length].to(spec.dtype))
            old = held[begin : begin + length]
            part = indices = None
            if any(line.writer.base for line in lines):
                part, indices = changes_of(number, begin, bits, old.to(bits.device))
                changed += len(indices)
                places = indices.cpu()
                old[places] = bits[indices].cpu()
            else:
                old.copy_(bits)
            for line in lines:
                if not line.writer.base or number in line.indivisible:
                    line.add(all_of(number, begin, bits))
                elif part is not None:
                    line.add(part)
        return changed

    def _name_version(self, version: str) -> None:
        """Gives the weights their version, when all of them are known to be there."""
        empty = [pack([])[0]] * self._engine.capabilities.tp_size
        run_sync(
            self._engine.control.update_weights_from(
                "tensor",
                serialized_named_tensors=empty,
                weight_version=version,
                timeout=self._options.send_timeout,
                draft=self.draft,
            )
        )

    async def post(self, line: DeltaLine, message: bytes, *, last: bool) -> None:
        """Posts a message to the servers of a line, which acknowledge it."""
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        entry, _ = pack([(loader.PAYLOAD, content)])
        # The first rank of a server gives it to the others.
        empty = [pack([])[0]] * (self._engine.capabilities.tp_size - 1)
        number, control = line.posted, self._engine.control
        line.posted += 1
        line.wire_bytes += len(entry) * len(line.urls)

        async def call(_: int, url: str) -> None:
            await control.update_weights_from(
                "tensor",
                serialized_named_tensors=[entry, *empty],
                load_format=loader.LOADER,
                weight_version=None,
                timeout=self._options.send_timeout,
                draft=self.draft,
                urls=[url],
            )
            states = await control.loader_states(
                loader.STATE, timeout=STATE_SECONDS, urls=[url]
            )
            state = DeltaState.read(states[url])
            problem = _problem(state, line.writer.update, number, last=last)
            if problem:
                raise WeightTransferError(
                    f"{url} {problem}; the next update sends it all weights."
                )

        await send_to_each(
            line.urls,
            call,
            refusals=_NOTHING_LOADED if number == 0 else (),
            message="A server did not take the weights.",
        )

    def _give_up(
        self, error: BaseException, lines: list[DeltaLine]
    ) -> WeightTransferError:
        """Waits until nothing is in flight, and returns the error to raise."""
        timeout = self._options.send_timeout + STATE_SECONDS + 10.0
        untouched = True
        for line in lines:
            message = line.in_flight
            failure = None if message is None else message.exception(timeout)
            refused = isinstance(failure, WeightTransferError) and failure.untouched
            # The first message, and no server has loaded it.
            untouched &= line.posted == 0 or (line.posted == 1 and refused)
        transfer = isinstance(error, WeightTransferError)
        text = str(error) if transfer else f"The weights did not arrive: {error}"
        return WeightTransferError(text, untouched=untouched)

    def _report(self, weights: Weights, lines: list[DeltaLine], changed: int) -> None:
        """Reports the share of elements that was sent."""
        self._reason = self.reason if self._reason is None else self._reason
        self.wire_bytes = sum(line.wire_bytes for line in lines)
        total = sum(spec.shape.numel() for spec in weights.specs)
        share = f"the {changed / max(total, 1):.2%} of elements that changed"
        texts = [
            f"{len(line.urls)} server(s): {share if line.writer.base else 'everything'}"
            for line in lines
        ]
        self.reason = f"{self._reason} Sent to {', to '.join(texts)}."


@dataclass(kw_only=True)
class DeltaLine:
    """The messages of an update to servers that get the same."""

    transport: DeltaTransport
    urls: list[str]
    writer: DeltaWriter
    indivisible: set[int]
    """Tensors that go as a whole."""
    in_flight: Future[None] | None = None
    """The message that the servers have not taken yet; the next is made meanwhile."""
    posted: int = 0
    """Number of messages that were posted."""
    wire_bytes: int = 0

    def add(self, part: Any) -> None:
        """Adds a part, and posts a message when it is full."""
        if self.writer.num_bytes + part.num_bytes > self.transport._message_bytes:
            self._post(last=False)
        self.writer.add(part)

    def finish(self) -> None:
        """Posts the last message, and waits until the servers hold everything."""
        self._post(last=True)
        self._wait()

    def _post(self, *, last: bool) -> None:
        message = self.writer.message(last=last)
        self._wait()
        self.in_flight = submit(self.transport.post(self, message, last=last))

    def _wait(self) -> None:
        if self.in_flight is not None:
            # Kept where it fails.
            self.in_flight.result()
            self.in_flight = None


def _problem(
    state: DeltaState | None, update: str, number: int, *, last: bool
) -> str | None:
    """Returns the problem in a server's answer to a message; None: it has none."""
    if state is not None and state.outcome != loader.OK:
        return _OUTCOMES.get(state.outcome, "could not load the weights")
    if state is None or state.update != update:
        return "does not know the update that it was sent"
    if state.next != number + 1:
        return f"waits for message {state.next}, and was sent message {number}"
    if last and not (state.token == update and state.intact):
        return "does not hold what it was sent"
    return None


_OUTCOMES = {
    loader.CORRUPT: "got a damaged message: its checksum is another one",
    loader.REFUSED: "refused changes against weights that it does not hold",
    loader.FAILED: "could not load the weights; its log says why",
}

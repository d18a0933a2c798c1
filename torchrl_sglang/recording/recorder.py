"""RunRecorder: appends the events of a run to files, while it runs."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.observer import (
    CollectorStarted,
    Event,
    GroupEnded,
    GroupFailed,
    GroupsTaken,
    GroupStale,
    GroupStarted,
    PhaseEnded,
    Subscriber,
    WeightsUpdated,
)
from torchrl_sglang.recording.format import HELD_OUT, Bounds, pack, write_manifest
from torchrl_sglang.recording.poll import ServerPoll
from torchrl_sglang.recording.records import (
    Scores,
    mismatch_of,
    row_key,
    summary_of,
    texts_of,
)
from torchrl_sglang.recording.software import read_software
from torchrl_sglang.recording.writer import Files, RecordWriter
from torchrl_sglang.support.checks import check_count, check_flag, check_seconds
from torchrl_sglang.types import SyncReport

LEAST_BYTES = 1_000_000
"""Least bound on the size of a recording."""

MOST_TOKENS = 2**20
"""Tokens whose texts are written are smaller: larger than any vocabulary."""


class RunRecorder:
    """Records a run in a folder, which ``torchrl-sglang view`` shows.

    It is one argument of :class:`.GRPO`, :class:`.AsyncLLMCollector` and
    :class:`.Gateway`, and records their events: groups with their conversations and
    tokens, weight updates, servers, and phases of the trainer. A loop of your own adds
    its phases and metrics.

    It never ends a run or makes it wait: a thread writes lines from a bounded queue.
    A full disk, a value that cannot be written or a mistake in the recorder costs the
    record and one warning.

    Args:
        folder: of the recording; it is made, or an existing recording is continued.

    Keyword Args:
        prompts (bool): record the policy's input: prompts, messages, results of tools.
            Defaults to True.
        responses (bool): record the policy's output, as text and tokens. Without them
            log-probs and versions are still there. Defaults to True.
        sample (float): share of the groups whose conversations are recorded; the
            numbers of all are. Defaults to 1.
        max_bytes (int): most that the folder holds; the oldest files make room then,
            which the recording says. Defaults to 1 GiB.
        poll_seconds (float): interval between statistics of servers. Defaults to 1.

    Raises:
        ConfigurationError: if an argument is wrong, or the folder cannot be written or
            has a recording of another format.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> recorder = RunRecorder(folder, max_bytes=100_000_000)
        >>> with recorder.phase("train"):
        ...     recorder.log({"train/loss": 0.5}, step=1)
        >>> recorder.close()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        prompts: bool = True,
        responses: bool = True,
        sample: float = 1.0,
        max_bytes: int = 2**30,
        poll_seconds: float = 1.0,
    ) -> None:
        if isinstance(sample, bool) or not (
            isinstance(sample, (int, float)) and 0 <= sample <= 1
        ):
            raise ConfigurationError(
                f"sample must be a share from 0 to 1, got {sample!r}."
            )
        self._bounds = Bounds(
            max_bytes=check_count("max_bytes", max_bytes, least=LEAST_BYTES),
            sample=float(sample),
            prompts=check_flag("prompts", prompts),
            responses=check_flag("responses", responses),
        )
        # Whoever changes the working directory later means the same folder.
        self.folder = Path(folder).expanduser().absolute()
        """Folder of the recording."""
        seconds = check_seconds("poll_seconds", poll_seconds)
        self._arguments: dict[str, Any] = {
            "folder": str(self.folder),
            "prompts": prompts,
            "responses": responses,
            "sample": sample,
            "max_bytes": max_bytes,
            "poll_seconds": poll_seconds,
        }
        write_manifest(self.folder, self._bounds, _version())
        name = f"{time.time_ns() // 1_000_000:x}{secrets.token_hex(2)}"
        files = Files(self.folder, name, self._bounds.max_bytes)
        self._writer = RecordWriter(files, str(self.folder))
        self._poll = ServerPoll(self._writer, seconds)
        self._tokens = _TokenStrips(self._bounds)
        # Dropping it writes what is queued, and ends its threads.
        self._finalizer = weakref.finalize(self, _end, self._poll, self._writer)
        start = {"kind": "start", "time": time.time(), "pid": os.getpid()}
        self._writer.put(partial(_write_start, start, os.getcwd()))

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process it has files of its own in the same folder.
        return partial(RunRecorder, **self._arguments), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunRecorder({str(self.folder)!r}, lost={self._writer.lost})"

    def close(self) -> None:
        """Writes all queued records, within ten seconds. Safe to call twice."""
        self._finalizer()

    @property
    def lost(self) -> int:
        """Number of records that could not be written."""
        return self._writer.lost

    # What users add.

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records that the trainer does something, such as ``"train"``.

        Args:
            name: ``"train"``, ``"evaluate"`` and ``"save"`` have colours of their own.
                Waiting for batches and sending weights is recorded by the collector.
        """
        start, clock = time.time(), time.monotonic()
        try:
            yield
        finally:
            self.add_phase(name, start, start + time.monotonic() - clock)

    def add_phase(self, name: str, start: float, end: float) -> None:
        """Records a phase that has ended, in seconds since the epoch."""
        self.event("phase", name=str(name), span=[start, end])

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Records settings, as TorchRL's loggers do; values without JSON as texts.

        Versions of packages and the commit of the working directory are recorded
        without a call. :class:`.GRPO` records its arguments.

        Args:
            hparams: names and values, which may be mappings. Later ones add to them.
        """
        self.event("settings", values=dict(hparams))

    def log(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Records metrics of a step: numbers, or tensors of one.

        Other values are left out and counted, with one warning.
        """
        values: dict[str, Any] = {}
        with self._forgiving("metrics"):
            number = None if step is None else int(step)
            for name, value in metrics.items():
                with self._forgiving(f"metric {name!r}"):
                    values[str(name)] = _number(value)
            if values:
                self.event("metrics", step=number, values=values)

    @contextmanager
    def _forgiving(self, name: str) -> Iterator[None]:
        """Counts an error of the block instead of raising it: a run never fails."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - Its record is all that fails.
            reason = f"{name} cannot be recorded, {type(error).__name__}: {error}"
            self._writer.lose("metric", reason)

    def trained(self, batch: Any, *, step: int | None = None) -> None:
        """Records that the responses of a batch were trained on, with advantages.

        Args:
            batch: rows of a collector, with ``"advantage"``.
            step: number of the batch.
        """
        self._writer.put(partial(_write_trained, batch, step, time.time()))

    def scored(self, parts: Sequence[tuple[Any, Any]]) -> None:
        """Records the log-probs that the trainer has of tokens.

        A :class:`.Learner` with ``recorder=`` calls it.

        Args:
            parts: rows, and log-probs ``(rows, tokens)`` of all of their tokens, padded
                on the left; NaN where they are not known.
        """
        if parts:
            cost = 1 + sum(log_probs.numel() for _, log_probs in parts)
            make = partial(scores_of, parts)
            self._writer.put(partial(_write_scored, make, time.time()), cost)

    def scored_elsewhere(self, scores: Scores | Exception) -> None:
        """Records the result, or the error, of :func:`scores_of` in another process."""
        if isinstance(scores, Exception):
            reason = f"the log-probs of another rank are not known, {scores}"
            self._writer.lose("scores", reason)
        elif scores.rows:
            cost = 1 + sum(len(packed) for packed in scores.log_probs.values()) // 4
            write = partial(_write_scored, lambda: scores, time.time())
            self._writer.put(write, cost)

    def watch(self, engine: Any) -> None:
        """Records the statistics of an engine's servers, until :meth:`close`."""
        self._poll.watch_engine(engine)
        with suppress(Exception):  # It may have no servers yet, or be of another kind.
            self.log_hparams({"version.sglang": engine.capabilities.version})

    def event(self, kind: str, **values: Any) -> None:
        """Records an event of now."""
        record = {"kind": kind, "time": time.time(), **values}
        self._writer.put(_EventJob(record))

    def __call__(self, event: Event) -> None:
        """Records an event of a collector or a gateway."""
        match event:
            case GroupStarted():
                self.event("began", id=event.id, position=event.position)
            case GroupEnded():
                self._writer.put(_GroupJob(self._tokens, event), 1 + event.tokens)
            case GroupFailed(group=group, error=error, retried=retried):
                self.event("failed", id=group.id, error=error[:500], retried=retried)
            case GroupStale():
                self.event("stale", id=event.group.id)
            case GroupsTaken(number=number, version=version, groups=groups):
                ids = [group.id for group in groups]
                self.event("batch", number=number, version=version, ids=ids)
            case WeightsUpdated():
                self.event("update", version=event.version, **_sync_of(event.report))
            case PhaseEnded():
                self.add_phase(event.name, event.start, event.end)
            case CollectorStarted():
                self.watch(event.engine)
                self._poll.watch("collector", event.read)


def held_out(recorder: Subscriber) -> Subscriber:
    """Returns the recorder of a collector of held-out prompts, which records groups."""

    def record(event: Event) -> None:
        match event:
            case GroupEnded():
                recorder(msgspec.structs.replace(event, status=HELD_OUT))
            case GroupStarted() | GroupFailed():
                recorder(event)

    return record


class _TokenStrips:
    """Writes groups, and the texts of tokens that were not written yet."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._file = ""
        self._forget()

    def write(self, event: GroupEnded, files: Files) -> None:
        responses = event.responses()
        summary = summary_of(event, responses, self._bounds)
        # Evenly spread.
        number, share = event.group.id, self._bounds.sample
        if int(number * share) > int((number - 1) * share):
            texts = texts_of(number, responses, self._bounds)
            if self._bounds.responses:
                self._write_vocabulary(texts, event.tokenizer, files)
            place = files.append("texts", texts)
            summary["texts"] = [place.file, place.offset, place.length]
        files.append("groups", summary)

    def _write_vocabulary(
        self, texts: Mapping[str, Any], tokenizer: Any, files: Files
    ) -> None:
        ids = [
            np.frombuffer(turn["ids"], "<u4")
            for response in texts["responses"]
            for turn in response["turns"]
        ]
        new = self._unknown(ids)
        if not new:
            return
        file = _write_pieces(new, tokenizer, files)
        if file != self._file:
            # Earlier files make room, or were not written: a new one has all again.
            self._file = file
            self._forget()
            if again := self._unknown(ids) - new:
                _write_pieces(again, tokenizer, files)
                self._known[list(again)] = True
        self._known[list(new)] = True

    def _forget(self) -> None:
        # Of each token, whether its text is written; of the last one it never is.
        self._known = np.zeros(MOST_TOKENS, bool)
        self._known[-1] = True

    def _unknown(self, ids: Iterable[np.ndarray[Any, Any]]) -> set[int]:
        """Returns the tokens among these whose texts are not written."""
        tokens: set[int] = set()
        for token_ids in ids:
            is_known = self._known.take(token_ids, mode="clip")
            if not is_known.all():
                tokens.update(token_ids[~is_known].tolist())
        return tokens


def _write_pieces(tokens: set[int], tokenizer: Any, files: Files) -> str:
    """Writes the texts of tokens, and returns the name of their file."""
    pieces = {str(token): tokenizer.decode([token]) for token in sorted(tokens)}
    return files.append("vocabulary", {"pieces": pieces}).file


class _EventJob(msgspec.Struct, frozen=True, gc=False):
    """Writes an event.

    Many of these wait to be written: functions in their place would begin garbage
    collections of the whole process.
    """

    record: Mapping[str, Any]

    def __call__(self, files: Files) -> None:
        files.append("events", self.record)


class _GroupJob(msgspec.Struct, frozen=True, gc=False):
    """Writes a group."""

    strips: _TokenStrips
    event: GroupEnded

    def __call__(self, files: Files) -> None:
        self.strips.write(self.event, files)


def _write_start(start: dict[str, Any], folder: str, files: Files) -> None:
    files.append("events", {**start, "settings": read_software(folder)})


def _sync_of(report: SyncReport | None) -> dict[str, Any]:
    """Returns the recorded fields of a report of a weight update."""
    if report is None:
        return {}
    return {
        "served": report.version,
        "transport": report.transport,
        "seconds": report.seconds,
        "bytes": report.num_bytes,
        "tensors": report.num_tensors,
        "phases": dict(report.phase_seconds),
    }


def _write_trained(batch: Any, step: int | None, now: float, files: Files) -> None:
    rows = []
    for row in batch.unbind(0):
        advantage = row.get("advantage", None)
        value = None if advantage is None else float(advantage.mean())
        rows.append({"key": _key_of(row), "advantage": value})
    event = {"kind": "trained", "time": now, "step": step, "rows": rows}
    files.append("events", event)


def scores_of(parts: Sequence[tuple[Any, Any]]) -> Scores:
    """Returns the records of the arguments of :meth:`RunRecorder.scored`."""
    rows, scores = [], {}
    for part, log_probs in parts:
        scored = log_probs.float().cpu().numpy()
        for row, row_log_probs in zip(part.unbind(0), scored, strict=True):
            key, length = _key_of(row), len(row["tokens", "response"])
            engine = row["log_probs", "full"]
            # A response can have no token, and [-0:] is everything.
            engine = engine[len(engine) - length :].float().cpu().numpy()
            trainer = row_log_probs[len(row_log_probs) - length :]
            rows.append({"key": key, **mismatch_of(trainer, engine)})
            scores[key] = pack(trainer, "f4")
    return Scores(rows=rows, log_probs=scores)


def _write_scored(make: Callable[[], Scores], now: float, files: Files) -> None:
    """Writes the trainer's log-probs of rows, and how far the engine's are."""
    scores = make()
    place = files.append("texts", {"scores": scores.log_probs})
    event = {"kind": "scored", "time": now, "rows": scores.rows}
    event["scores"] = [place.file, place.offset, place.length]
    files.append("events", event)


def _key_of(row: Any) -> str:
    return row_key(row["tokens", "full"].cpu().numpy())


def _number(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return float(value)


def _end(poll: ServerPoll, writer: RecordWriter) -> None:
    poll.close()
    writer.close()


def _version() -> str:
    try:
        return version("torchrl_sglang")
    except PackageNotFoundError:
        # A checkout that is on the path.
        return "unknown"

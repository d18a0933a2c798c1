"""Reads a recording: also while it grows, cut off, damaged, or too large."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.format import find_recording, read_manifest

MOST_BYTES = {"events": 100_000_000, "groups": 200_000_000, "vocabulary": 50_000_000}
"""Stream -> bytes that are read of it, the newest ones."""

MOST_OF_LINE = 16_000_000
"""Bytes of the longest line that is read."""

BLOCK = 4_000_000
"""Bytes that are read at once."""


@dataclass(kw_only=True)
class _Tail:
    """A file, and how far it was read."""

    path: Path
    offset: int
    skips: bool
    """The line at this place is not read: it is too long, or its beginning is not
    there."""
    rest: bytes = b""
    """The beginning of a line whose end is not written yet."""

    def read(self, damaged: list[str]) -> list[dict[str, Any]]:
        """Returns the lines that were added."""
        found: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while block := file.read(BLOCK):
                self.offset += len(block)
                *lines, self.rest = (self.rest + block).split(b"\n")
                for line in lines:
                    if self.skips:
                        self.skips = False
                        continue
                    self._add(line, found, damaged)
                if len(self.rest) > MOST_OF_LINE:
                    damaged.append(f"{self.path.name}: a line is too long")
                    self.rest, self.skips = b"", True
        return found

    def _add(
        self, line: bytes, found: list[dict[str, Any]], damaged: list[str]
    ) -> None:
        if not line:
            return
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged.append(f"{self.path.name}: a line is no record")


@dataclass(kw_only=True)
class Recording:
    """The lines of a recording; :meth:`refresh` reads what was added.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> recorder = RunRecorder(folder)
        >>> recorder.log({"reward": 0.5}, step=1)
        >>> recorder.close()
        >>> recording = Recording.open(folder)
        >>> [event["kind"] for event in recording.events]
        ['start', 'metrics']
    """

    folder: Path
    manifest: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the stream of events."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the stream of groups."""
    pieces: dict[int, str] = field(default_factory=dict)
    """Texts of tokens."""
    left_out: list[str] = field(default_factory=list)
    """Sentences on what is too large to be read."""
    damaged: list[str] = field(default_factory=list)
    """Lines that could not be read."""
    _tails: dict[str, _Tail] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Any) -> Recording:
        """Reads a recording, or that of a run in its folder.

        Raises:
            ConfigurationError: if there is none, or it has another format.
        """
        found = find_recording(folder)
        made = cls(folder=found, manifest=read_manifest(found))
        made.refresh()
        return made

    @property
    def unfinished(self) -> list[str]:
        """Files whose last line is not complete."""
        return [name for name, tail in self._tails.items() if tail.rest]

    def refresh(self) -> bool:
        """Reads what was added; returns whether something was."""
        with _uncollected():
            return self._refresh()

    def _refresh(self) -> bool:
        changed = False
        for stream, most in MOST_BYTES.items():
            for tail in self._new_files(stream, most):
                self._tails[tail.path.name] = tail
            known = [n for n in self._tails if n.startswith(f"{stream}-")]
            for name in sorted(known):
                changed |= self._read(stream, self._tails[name])
        return changed

    def _read(self, stream: str, tail: _Tail) -> bool:
        try:
            found = tail.read(self.damaged)
        except FileNotFoundError:
            # It made room for a newer one.
            return False
        except OSError as error:
            self.damaged.append(f"{tail.path.name}: {error}")
            return False
        if stream == "events":
            self.events += found
        elif stream == "groups":
            self.groups += found
        else:
            for each in found:
                pieces = each.get("pieces")
                for token, text in (pieces if isinstance(pieces, dict) else {}).items():
                    self.pieces[int(token)] = str(text)
        return bool(found)

    def _new_files(self, stream: str, most: int) -> list[_Tail]:
        """Returns files that are not known: the newest, of so many bytes together."""
        paths = [
            (path.stat().st_mtime_ns, path.name, path, path.stat().st_size)
            for path in self.folder.glob(f"{stream}-*.jsonl")
            if path.name not in self._tails
        ]
        tails, left = [], most
        for _, _, path, size in sorted(paths, reverse=True):
            start = max(size - left, 0)
            left -= size - start
            if start:
                self.left_out.append(
                    f"Of {path.name}, {size / 1e6:,.0f} MB, the first "
                    f"{start / 1e6:,.0f} MB are not shown."
                )
            tails.append(_Tail(path=path, offset=start, skips=start > 0))
        return tails

    def read_texts(self, place: Any) -> dict[str, Any] | None:
        """Returns a line of the stream of texts.

        Args:
            place: file, offset and length, as a line of groups has it.

        Returns:
            ``None`` if it is not there any more, or is damaged.
        """
        try:
            name, offset, length = place
            if Path(name).name != name or not 0 < length <= MOST_OF_LINE:
                return None
            with (self.folder / name).open("rb") as file:
                file.seek(offset)
                found = json.loads(file.read(length))
        except (OSError, ValueError, TypeError):
            return None
        return found if isinstance(found, dict) else None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Has no garbage collected in the block: it would visit each line many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_all(folders: list[Any]) -> list[Recording]:
    """Opens several recordings.

    Raises:
        ConfigurationError: if there is none, or one of them cannot be opened.
    """
    if not folders:
        raise ConfigurationError("Give the folder of a run.")
    return [Recording.open(each) for each in folders]

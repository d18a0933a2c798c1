"""Reads a recording: also while it grows, cut off, damaged, or too large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.format import (
    files_of,
    find_recording,
    read_manifest,
    writer_of,
)
from torchrl_sglang.recording.lines import ERRORS, GroupLine, read_group, read_line
from torchrl_sglang.support.garbage import collect_garbage_afterwards

Line = TypeVar("Line")

MOST_BYTES = {"events": 100_000_000, "groups": 200_000_000, "vocabulary": 50_000_000}
"""Stream -> bytes that are read of it, the newest ones."""

MOST_OF_LINE = 16_000_000
"""Bytes of the longest line that is read."""

MOST_OF_TEXTS = 500_000_000
"""Bytes of the longest line of texts: a group of sixteen responses of a million tokens
has half of it."""

BLOCK = 4_000_000
"""Bytes that are read at once."""

MOST_TOLD = 20
"""Damaged lines that are named; all are counted."""


@dataclass(kw_only=True)
class Damage:
    """Lines that could not be read."""

    first: list[str] = field(default_factory=list)
    """What is wrong with the first ones."""
    count: int = 0
    """How many they are."""

    def add(self, what: str) -> None:
        """Counts a line."""
        self.count += 1
        if len(self.first) < MOST_TOLD:
            self.first.append(what)


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

    def read(self, parse: Callable[[bytes], Line], damage: Damage) -> list[Line]:
        """Returns the lines that were added, as a function reads them."""
        records: list[Line] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while block := file.read(BLOCK):
                self.offset += len(block)
                *lines, self.rest = (self.rest + block).split(b"\n")
                if self.skips and lines:
                    self.skips, lines = False, lines[1:]
                for line in filter(None, lines):
                    try:
                        records.append(parse(line))
                    except ERRORS:
                        damage.add(f"{self.path.name}: a line is no record")
                if len(self.rest) > MOST_OF_LINE:
                    if not self.skips:
                        damage.add(f"{self.path.name}: a line is too long")
                    self.rest, self.skips = b"", True
        return records


@dataclass(kw_only=True)
class Recording:
    """The lines of a recording; :meth:`refresh` reads new ones.

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
    groups: list[GroupLine] = field(default_factory=list)
    """Lines of the stream of groups."""
    malformed: int = 0
    """Lines that are records, but not of their stream."""
    pieces: dict[int, str] = field(default_factory=dict)
    """Texts of tokens."""
    left_out: list[str] = field(default_factory=list)
    """Sentences on what is too large to be read."""
    damage: Damage = field(default_factory=Damage)
    _tails: dict[str, _Tail] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Any) -> Recording:
        """Reads a recording, given its folder or the folder of its run.

        Raises:
            ConfigurationError: if there is none, or it has another format.
        """
        made = cls.find(folder)
        made.refresh()
        return made

    @classmethod
    def find(cls, folder: Any) -> Recording:
        """Finds a recording as :meth:`open` does, and reads no line of it.

        Raises:
            ConfigurationError: if there is none, or it has another format.
        """
        path = find_recording(folder)
        return cls(folder=path, manifest=read_manifest(path))

    @property
    def writers(self) -> list[str]:
        """Names of its writers, in the order in which they began."""
        return sorted({writer_of(name) for name in self._tails})

    @property
    def unfinished(self) -> list[str]:
        """Files whose last line is not complete."""
        return [name for name, tail in self._tails.items() if tail.rest]

    def refresh(self) -> bool:
        """Reads new lines; returns whether there are any."""
        with collect_garbage_afterwards():
            return self._refresh()

    def _refresh(self) -> bool:
        changed = False
        for stream, max_bytes in MOST_BYTES.items():
            for tail in self._new_files(stream, max_bytes):
                self._tails[tail.path.name] = tail
            names = [n for n in self._tails if n.startswith(f"{stream}-")]
            for name in sorted(names):
                changed |= self._read(stream, self._tails[name])
        return changed

    def _read(self, stream: str, tail: _Tail) -> bool:
        writer = writer_of(tail.path.name)
        try:
            if stream == "groups":
                parse = partial(read_group, writer=writer)
                return self._add_groups(tail.read(parse, self.damage))
            records = tail.read(read_line, self.damage)
        except FileNotFoundError:
            # It made room for a newer one.
            return False
        except OSError as error:
            self.damage.add(f"{tail.path.name}: {error}")
            return False
        if stream == "events":
            for event in records:
                event["writer"] = writer
            self.events += records
        else:
            self._add_pieces(records)
        return bool(records)

    def _add_groups(self, lines: list[GroupLine | None]) -> bool:
        groups = [line for line in lines if line is not None]
        self.groups += groups
        self.malformed += len(lines) - len(groups)
        return bool(lines)

    def _add_pieces(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            try:
                self.pieces |= {int(k): str(v) for k, v in line["pieces"].items()}
            except (KeyError, AttributeError, ValueError):
                self.malformed += 1

    def _new_files(self, stream: str, max_bytes: int) -> list[_Tail]:
        """Returns files that are not known: the newest, of so many bytes together."""
        paths = files_of(self.folder, stream)
        tails, bytes_left = [], max_bytes
        for path, size in reversed(paths):
            if path.name in self._tails:
                continue
            start = max(size - bytes_left, 0)
            bytes_left -= size - start
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
            if Path(name).name != name or not 0 < length <= MOST_OF_TEXTS:
                return None
            with (self.folder / name).open("rb") as file:
                file.seek(offset)
                return read_line(file.read(length))
        except (OSError, *ERRORS, TypeError):
            return None


def find_all(folders: list[Any]) -> list[Recording]:
    """Finds one or several different recordings, and reads no line of them."""
    if not folders:
        raise ConfigurationError("Give the folder of a run.")
    recordings = [Recording.find(folder) for folder in folders]
    if len({recording.folder.resolve() for recording in recordings}) < len(recordings):
        raise ConfigurationError(
            f"{str(folders[0])!r} was given twice; give the folders of two runs."
        )
    return recordings

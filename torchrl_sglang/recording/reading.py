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
        found: list[Line] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while block := file.read(BLOCK):
                self.offset += len(block)
                *lines, self.rest = (self.rest + block).split(b"\n")
                if self.skips and lines:
                    self.skips, lines = False, lines[1:]
                for line in filter(None, lines):
                    try:
                        found.append(parse(line))
                    except ERRORS:
                        damage.add(f"{self.path.name}: a line is no record")
                if len(self.rest) > MOST_OF_LINE:
                    if not self.skips:
                        damage.add(f"{self.path.name}: a line is too long")
                    self.rest, self.skips = b"", True
        return found


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
        """Reads a recording, or that of a run in its folder.

        Raises:
            ConfigurationError: if there is none, or it has another format.
        """
        made = cls.find(folder)
        made.refresh()
        return made

    @classmethod
    def find(cls, folder: Any) -> Recording:
        """Returns a recording, or that of a run in its folder; nothing of it is read.

        Raises:
            ConfigurationError: if there is none, or it has another format.
        """
        found = find_recording(folder)
        return cls(folder=found, manifest=read_manifest(found))

    @property
    def writers(self) -> list[str]:
        """Names of its writers, in the order in which they began."""
        return sorted({writer_of(name) for name in self._tails})

    @property
    def unfinished(self) -> list[str]:
        """Files whose last line is not complete."""
        return [name for name, tail in self._tails.items() if tail.rest]

    def refresh(self) -> bool:
        """Reads what was added; returns whether something was."""
        with collect_garbage_afterwards():
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
        writer = writer_of(tail.path.name)
        try:
            if stream == "groups":
                parse = partial(read_group, writer=writer)
                return self._add_groups(tail.read(parse, self.damage))
            found = tail.read(read_line, self.damage)
        except FileNotFoundError:
            # It made room for a newer one.
            return False
        except OSError as error:
            self.damage.add(f"{tail.path.name}: {error}")
            return False
        if stream == "events":
            for event in found:
                event["writer"] = writer
            self.events += found
        else:
            self._add_pieces(found)
        return bool(found)

    def _add_groups(self, found: list[GroupLine | None]) -> bool:
        groups = [line for line in found if line is not None]
        self.groups += groups
        self.malformed += len(found) - len(groups)
        return bool(found)

    def _add_pieces(self, lines: list[dict[str, Any]]) -> None:
        for each in lines:
            try:
                self.pieces |= {int(k): str(v) for k, v in each["pieces"].items()}
            except (KeyError, AttributeError, ValueError):
                self.malformed += 1

    def _new_files(self, stream: str, most: int) -> list[_Tail]:
        """Returns files that are not known: the newest, of so many bytes together."""
        paths = files_of(self.folder, stream)
        tails, left = [], most
        for path, size in reversed(paths):
            if path.name in self._tails:
                continue
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
            if Path(name).name != name or not 0 < length <= MOST_OF_TEXTS:
                return None
            with (self.folder / name).open("rb") as file:
                file.seek(offset)
                return read_line(file.read(length))
        except (OSError, *ERRORS, TypeError):
            return None


def find_all(folders: list[Any]) -> list[Recording]:
    """Returns several recordings, of which nothing is read.

    Raises:
        ConfigurationError: if there is none, one of them is no recording, or two are
            the same.
    """
    if not folders:
        raise ConfigurationError("Give the folder of a run.")
    found = [Recording.find(each) for each in folders]
    if len({each.folder.resolve() for each in found}) < len(found):
        raise ConfigurationError(
            f"{str(folders[0])!r} was given twice; give the folders of two runs."
        )
    return found

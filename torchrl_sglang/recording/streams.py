"""Files that are appended to, whose total size is bounded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torchrl_sglang.recording.format import FILES_OF_STREAM, files_of, number_of
from torchrl_sglang.support.private_files import for_owner


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlace:
    """Where a line is."""

    file: str
    """Name of the file."""
    offset: int
    """Bytes before the line."""
    length: int
    """Bytes of the line, its end included."""


@dataclass(kw_only=True)
class LineStream:
    """Files of one kind of lines; the oldest one makes room for the next.

    ``most_bytes`` bounds all files of the stream, also earlier writers' files.
    """

    folder: Path
    name: str
    writer: str
    most_bytes: int
    removed: list[str] = field(default_factory=list)
    """Files that made room, since somebody asked."""
    unwritten: int = 0
    """Lines that were taken and did not reach the disk, since somebody asked."""
    _ends: list[int] = field(default_factory=list)
    """Of the lines that are not known to be in the file."""
    _file: BinaryIO | None = None
    _file_name: str = ""
    _number: int = -1
    _size: int = 0

    def append(self, line: bytes) -> StreamPlace:
        """Writes a line, and returns where it is; an error ends the file."""
        if self._file is None or self._size + len(line) > self._most_of_file:
            self._begin_file()
        assert self._file is not None
        place = StreamPlace(file=self._file_name, offset=self._size, length=len(line))
        try:
            self._file.write(line)
        except OSError:
            self._fail()
            raise
        self._size += len(line)
        self._ends.append(self._size)
        return place

    def flush(self) -> None:
        """Flushes the lines to the system; an OSError is as in :meth:`append`."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError:
                self._fail()
                raise
            self._ends.clear()
            if not os.fstat(self._file.fileno()).st_nlink:
                # It made room for a file of another process.
                self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                self._count()
        self._ends.clear()

    def _fail(self) -> None:
        """Ends a file that cannot be written; its missing lines are lost."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                # It tries once more.
                file.close()
        self._count()

    def _count(self) -> None:
        ends, self._ends = self._ends, []
        try:
            size = (self.folder / self._file_name).stat().st_size
        except OSError:
            size = 0
        self.unwritten += sum(end > size for end in ends)

    @property
    def _most_of_file(self) -> int:
        return self.most_bytes // FILES_OF_STREAM

    def _begin_file(self) -> None:
        self.close()
        files = files_of(self.folder, self.name)
        numbers = [self._number, *(number_of(path.name) for path, _ in files)]
        self._number = max(numbers) + 1
        self._make_room(files)
        self._file_name = f"{self.name}-{self.writer}-{self._number:05}.jsonl"
        self._size = 0
        path = self.folder / self._file_name
        self._file = open(path, "ab", opener=for_owner)  # noqa: SIM115

    def _make_room(self, found: Sequence[tuple[Path, int]]) -> None:
        """Removes the oldest files, so that there is room for another one."""
        total = sum(size for _, size in found)
        for path, size in found:
            if total + self._most_of_file <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            self.removed.append(path.name)
            total -= size

"""The files of a recording, and its format number. Pure, apart from the manifest.

A folder holds:

- ``recording.json``: format, version of this package, and bounds;
- ``events-WRITER-00000.jsonl``: weight updates, phases of the trainer, servers,
  metrics, batches, and what becomes of groups, in the order of time;
- ``groups-WRITER-00000.jsonl``: a line for each group, when it ends;
- ``texts-WRITER-00000.jsonl``: the conversations of a group with their tokens; a line
  of ``groups`` says where;
- ``vocabulary-WRITER-00000.jsonl``: texts of the tokens, each when it is first used.

``WRITER`` is another one for each recorder, so that two never write to one file. A line
is JSON; times are seconds since the epoch. When a stream reaches its share of the
bound, its oldest file is removed, and an event of the kind ``"dropped"`` says so. A new
file has a greater number than all of its stream: clocks may be set back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.private_files import FOLDER_MODE, for_owner

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
"""Number of this format. Readers refuse others."""

MANIFEST = "recording.json"

HELD_OUT = "held-out"
"""Status of a group of a prompt that is not trained on."""

SUBFOLDER = "record"
"""Folder of a recording in the folder of a run."""

SHARES = {"events": 0.15, "groups": 0.2, "texts": 0.6, "vocabulary": 0.05}
"""Stream -> share of the bound on the size of a folder."""

FILES_OF_STREAM = 8
"""A stream's share is cut into so many files; the oldest one is removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds on a recording."""

    max_bytes: int
    """Size of the folder."""
    sample: float
    """Share of the groups whose conversations are recorded, beside their numbers."""
    prompts: bool
    """Whether the texts that the policy reads are recorded."""
    responses: bool
    """Whether the texts and tokens that it writes are recorded."""


def files_of(folder: Path, stream: str) -> list[tuple[Path, int]]:
    """Returns the files of a stream and their sizes, in the order of their numbers.

    Another process may remove one meanwhile.
    """
    files = []
    for path in folder.glob(f"{stream}-*.jsonl"):
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            files.append((number_of(path.name), path.name, path, size))
    return [(path, size) for _, _, path, size in sorted(files)]


def number_of(name: str) -> int:
    """Returns the number of a file, by its name; -1: it has none."""
    number = name.rpartition("-")[2].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def writer_of(name: str) -> str:
    """Returns the writer of a file, by its name."""
    return name.partition("-")[2].rpartition("-")[0]


def write_manifest(folder: Path, bounds: Bounds, version: str) -> None:
    """Makes a folder a recording; an existing recording is continued."""
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        path = folder / MANIFEST
        if path.exists():
            read_manifest(folder)
            return
        content = {
            "format": FORMAT,
            "torchrl_sglang": version,
            "max_bytes": bounds.max_bytes,
            "sample": bounds.sample,
            "prompts": bounds.prompts,
            "responses": bounds.responses,
        }
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with open(partial, "w", encoding="utf-8", opener=for_owner) as file:
                file.write(json.dumps(content, indent=2) + "\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{str(folder)!r} cannot hold a recording: {error}. Give another folder."
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a recording of this format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        number = manifest["format"]
    except FileNotFoundError:
        raise ConfigurationError(
            f"{str(folder)!r} is not the folder of a recording: it has no {MANIFEST}. "
            f"Give the folder of a RunRecorder, or the output of a run that recorded."
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read ({error}), so that the format of the "
            f'recording is not known. If it is of this version, write {{"format": '
            f"{FORMAT}}} to it."
        ) from error
    if number != FORMAT:
        writer = manifest.get("torchrl_sglang", "another version")
        raise ConfigurationError(
            f"The recording in {str(folder)!r} has format {number!r}, written by "
            f"torchrl-sglang {writer}; this version reads format {FORMAT}. Open it "
            f"with that version, or record to another folder."
        )
    return dict(manifest)


def find_recording(given: str | os.PathLike[str]) -> Path:
    """Returns the folder of a recording, given itself or the folder of its run."""
    folder = Path(given).expanduser()
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{str(folder)!r} {reason}; give a run's folder.")
    inner = folder / SUBFOLDER
    if not (folder / MANIFEST).exists() and (inner / MANIFEST).exists():
        return inner
    return folder


def pack(values: Sequence[float] | np.ndarray[Any, Any], kind: str) -> bytes:
    """Returns numbers as little-endian ``"i4"`` or ``"f4"``; in a line it is base64."""
    if isinstance(values, list):
        try:
            # Half of the time of an array of numpy.
            return struct.pack(f"<{len(values)}{kind[0]}", *values)
        except (struct.error, OverflowError):
            # A number of another type, or one that becomes infinite.
            pass
    import numpy as np

    return np.asarray(values, f"<{kind}").tobytes()


def key_of(*packed: bytes) -> str:
    """Returns the :func:`.row_key` of tokens that are packed, in parts."""
    return hashlib.blake2b(b"".join(packed), digest_size=8).hexdigest()


def unpack(text: str, kind: str) -> np.ndarray[Any, Any]:
    """Returns the numbers of :func:`pack`, given the text in a line."""
    # Not needed to open a run.
    import numpy as np

    return np.frombuffer(base64.b64decode(text, validate=True), f"<{kind}")

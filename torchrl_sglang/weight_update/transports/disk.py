"""Checkpoints on a file system that trainer and servers share.

For servers that nothing faster reaches: on other machines, or with pipeline stages.
What is published is a whole checkpoint that any server can be started from. It appears
under its name in one step, so whoever finds it finds all of it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.client.checkpoint_mark import MARK, write_mark
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import RequestRefusedError, WeightTransferError
from torchrl_sglang.weight_update.buckets import Bucket, plan_buckets
from torchrl_sglang.weight_update.sources.weights import NamedTensors, Weights
from torchrl_sglang.weight_update.transports.base import (
    BUCKET_BYTES,
    SEND_TIMEOUT_SECONDS,
)

__all__ = ["DiskTransport"]

KEPT = 2
"""How many checkpoints stay: the current one, and the one that a server which is slow
to take it may still read."""

UNFINISHED = ".unfinished-"
"""Begins the name of a folder that is being written or removed."""

UNFINISHED_NAME = re.compile(re.escape(UNFINISHED) + "[0-9a-f]{32}")
"""The whole name."""

LOAD_FORMAT = "safetensors"
"""What the servers are told to read: one that was started with ``load_format="dummy"``
would read nothing."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in the safetensors format."""

_WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "*.index.json",
)
"""What of a model's folder is not copied: weights, and lists of them."""

_NOTHING_LOADED = ("Failed to get weights iterator", "Failed to get model loader")
"""How a server's refusal begins when it has not touched its weights."""


class DiskTransport:
    """Writes ``<directory>/v<version>``, and has every server load that.

    The folder holds the weights in safetensors files and the rest of the served model's
    folder (configuration, tokenizer), so that a server can be started from it. The last
    two stay; older ones that this package has written are removed.

    Args:
        engine: the servers.
        directory: where to write; the same path here and on every server's machine,
            and used by one trainer only. It is made where it is missing.
        bucket_bytes: most bytes of a file; a larger tensor has one to itself.
        send_timeout: budget for the servers to load the weights, in seconds.
    """

    name: ClassVar[str] = "disk"
    # A server restores and processes its weights by itself when it loads from disk.
    in_session: ClassVar[bool] = False

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        directory: str | os.PathLike[str],
        bucket_bytes: int = BUCKET_BYTES,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        self._engine = engine
        # A server has a working directory of its own.
        self._directory = Path(directory).absolute()
        self._bucket_bytes = bucket_bytes
        self._send_timeout = send_timeout
        self._connected = False

    @property
    def connected(self) -> bool:
        """Whether there is a directory to write to."""
        return self._connected and self._directory.is_dir()

    def connect(self) -> None:
        """Makes the directory; see :class:`.WeightTransport`."""
        with self._before_servers():
            self._directory.mkdir(parents=True, exist_ok=True)
            if not os.access(self._directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._connected = True

    def send(self, weights: Weights, *, version: str) -> int:
        """Publishes a checkpoint and has it loaded; see :class:`.WeightTransport`.

        Returns:
            How many files hold the tensors.
        """
        with ExitStack() as held:
            with self._before_servers():
                held.enter_context(_locked(self._directory))
                self._remove_unfinished()
                folder, count = self._publish(weights, version)
            self._load(folder, version)
            self._remove_old()
        return count

    def close(self) -> None:
        """Leaves what was written where it is."""
        self._connected = False

    def _publish(self, weights: Weights, version: str) -> tuple[Path, int]:
        target = self._directory / f"v{version}"
        if target.exists() and not (target / MARK).is_file():
            raise WeightTransferError(
                f"{target} is in the way, and it was not written by this package; "
                f"give an empty directory."
            )
        model = self._engine.model_path
        folder = self._unfinished()
        folder.mkdir()
        try:
            write_mark(folder, model)
            _copy_model_files(model, folder)
            count = _write_weights(weights, folder, self._bucket_bytes)
            _sync(folder)
            if target.exists():
                # Of an earlier run, whose versions began at the same number, or of an
                # update that failed.
                self._remove(target)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _sync(self._directory)
        return target, count

    def _load(self, folder: Path, version: str) -> None:
        control = self._engine.control

        async def load() -> list[BaseException | None]:
            return await asyncio.gather(
                *(
                    control.update_weights_from_disk(
                        str(folder),
                        load_format=LOAD_FORMAT,
                        weight_version=version,
                        timeout=self._send_timeout,
                        urls=[url],
                    )
                    for url in control.urls
                ),
                return_exceptions=True,
            )

        outcomes = run_sync(load())
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise WeightTransferError(
                    f"A server did not load {folder}: {outcome} Does every server see "
                    f"that path?",
                    untouched=all(map(_nothing_loaded, outcomes)),
                ) from outcome

    def _remove_old(self) -> None:
        """Removes what this package has written here, but for the latest."""
        try:
            marks = self._directory.glob(f"v*/{MARK}")
            by_age = sorted(marks, key=lambda mark: mark.stat().st_mtime_ns)
            for mark in by_age[:-KEPT]:
                self._remove(mark.parent)
        except OSError as error:
            # The servers have the new weights: that is what was asked for.
            torchrl_logger.warning(f"Old weights could not be removed: {error}")

    def _remove_unfinished(self) -> None:
        """Removes what a trainer that was killed has left; nobody writes now."""
        for folder in self._directory.glob(f"{UNFINISHED}*"):
            # One that was just made, or is half removed, has no mark.
            if UNFINISHED_NAME.fullmatch(folder.name) and folder.is_dir():
                _delete(folder)

    def _remove(self, folder: Path) -> None:
        # Half of a checkpoint must not be found under its name.
        gone = self._unfinished()
        folder.rename(gone)
        _delete(gone)

    def _unfinished(self) -> Path:
        return self._directory / f"{UNFINISHED}{uuid.uuid4().hex}"

    @contextmanager
    def _before_servers(self) -> Iterator[None]:
        """Turns whatever fails before a server is told anything into what it means."""
        try:
            yield
        except WeightTransferError as error:
            raise error.replace(untouched=True) from error.__cause__
        except OSError as error:
            room = ""
            with suppress(OSError):
                free = shutil.disk_usage(self._directory).free
                room = f" There are {free / 1e9:.3g} GB left."
            raise WeightTransferError(
                f"Weights cannot be written to {self._directory}: {error}.{room} Make "
                f"room, or give another directory.",
                untouched=True,
            ) from error
        except Exception as error:
            raise WeightTransferError(
                f"No checkpoint could be written: {error}", untouched=True
            ) from error


def _nothing_loaded(outcome: BaseException | None) -> bool:
    return isinstance(outcome, RequestRefusedError) and any(
        words in str(outcome) for words in _NOTHING_LOADED
    )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other trainers out of a directory, where the file system can."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeightTransferError(
                f"Another trainer is writing weights to {directory}; give each trainer "
                f"a directory of its own."
            ) from None
        except OSError as error:
            torchrl_logger.debug(f"{directory} cannot be locked: {error}")
        yield
    finally:
        os.close(handle)


def _write_weights(weights: Weights, folder: Path, bucket_bytes: int) -> int:
    """Writes files of tensors and the list of them; returns how many files."""
    total = len(plan_buckets(weights.specs, bucket_bytes))
    places: dict[str, str] = {}
    for index, (bucket, tensors) in enumerate(weights.buckets(bucket_bytes)):
        name = f"model-{index + 1:05}-of-{total:05}.safetensors"
        _write_tensors(folder / name, bucket, tensors)
        places.update(dict.fromkeys((spec.name for spec in bucket.specs), name))
        # The next bucket is made after this line, and this one is to be gone by then.
        del tensors
    content = {
        "metadata": {"total_size": weights.num_bytes},
        "weight_map": places,
    }
    _write(folder / "model.safetensors.index.json", json.dumps(content).encode())
    return total


def _write_tensors(path: Path, bucket: Bucket, tensors: NamedTensors) -> None:
    """Writes a bucket in the safetensors format: it has the layout of one already."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        if spec.dtype not in _DTYPES:
            raise WeightTransferError(
                f"{spec.name} is served as {spec.dtype}, which a checkpoint cannot "
                f"hold; use transport='broadcast'."
            )
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in bucket.specs:
            value = tensors[spec.name].detach().to("cpu", spec.dtype).contiguous()
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _copy_model_files(model: str, folder: Path) -> None:
    """Copies what makes weights a model: configuration, tokenizer, code."""
    source = _folder_of(model)
    if source is None:
        torchrl_logger.warning(
            f"The folder of the served model {model!r} cannot be read here, so the "
            f"checkpoints hold weights only; no server can be started from them."
        )
        return
    for path in sorted(source.iterdir()):
        hidden = path.name.startswith(".")
        if path.is_file() and not hidden and not any(map(path.match, _WEIGHT_FILES)):
            _write(folder / path.name, path.read_bytes())


def _folder_of(model: str) -> Path | None:
    """Returns the folder of a model, which may be a hub name; downloads nothing."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # It has not the form of a hub name.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Has the names in a folder survive a power failure, as its files do."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        torchrl_logger.warning(f"{folder} could not be removed: {error}")

"""Writes checkpoints to a file system that trainer and servers share.

For servers that nothing faster reaches: on other machines, or with pipeline stages.
Each checkpoint appears under its name in one step, so readers always find a complete
one. Recovery loads the checkpoint that the servers were started with.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file

from torchrl_sglang.backends.client.model_info import MARK, write_mark
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.weight_update.transports.base import (
    CPU,
    UNPROVEN,
    TransportOptions,
    WeightTransport,
    send_to_each,
)
from torchrl_sglang.weight_update.weights import (
    Weights,
    flatten,
    plan_buckets,
    read_buckets,
)

KEPT = 2
"""Checkpoints that stay: the current one, and one that a slow server still reads."""

UNFINISHED = ".unfinished-"
"""Prefix of a folder that is being written or removed."""

LOAD_FORMAT: Literal["safetensors"] = "safetensors"
"""A server with ``load_format="dummy"`` would read nothing otherwise."""

_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pth?|gguf|msgpack|h5|onnx|index\.json)|\..*"
)
"""Files of a model's folder that are not copied: weights, indexes, hidden ones."""

_NOTHING_LOADED = ("Failed to get weights iterator", "Failed to get model loader")
"""Refusals of a server that has not touched its weights."""


@dataclass(frozen=True, kw_only=True)
class DiskOptions(TransportOptions):
    """Options of ``transport="disk"``; ``send_timeout`` is for loading everything."""

    directory: str | os.PathLike[str] | None = None
    """Folder for this trainer alone, under the same path here and on every server's
    machine; made if it is missing. The last two checkpoints stay there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        path: Any = self.directory
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str) or not path.strip():
            raise ConfigurationError(
                f"transport='disk' needs directory=...; it must be a folder that this "
                f"process and every server see under the same path, got {path!r}."
            )
        # A server has its own working directory.
        self._set("directory", Path(path).expanduser().absolute())


class DiskTransport(WeightTransport):
    """Writes ``<directory>/v<version>``, and makes every server load it.

    The folder holds the weights in safetensors files and the rest of the served model's
    folder (configuration, tokenizer), so a server can be started from it.
    """

    name = "disk"
    route = "disk"
    options_type = DiskOptions
    _connected = False

    @property
    def _directory(self) -> Path:
        directory: Path = self._options.directory
        return directory

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
        """Publishes a checkpoint and has it loaded; returns the number of its files."""
        lock = None
        try:
            with self._before_servers():
                lock = _lock(self._directory)
                self._remove_unfinished()
                folder, count = self._publish(weights, version)
            try:
                self._load(folder, version)
            finally:
                if version == UNPROVEN:
                    # The others have these weights in a checkpoint of their own.
                    self._remove(folder)
                # Also of updates that failed.
                self._remove_old()
        finally:
            if lock is not None:
                os.close(lock)
        return count

    def close(self) -> None:
        """Leaves the checkpoints where they are."""
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
            count = _write_weights(weights, folder, self._options.bucket_bytes)
            _sync(folder)
            if target.exists():
                # From an earlier run, whose versions began at the same number, or from
                # an update that failed.
                self._remove(target)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _sync(self._directory)
        return target, count

    def _load(self, folder: Path, version: str) -> None:
        control = self._engine.control

        async def load(_: int, url: str) -> None:
            await control.update_weights_from(
                "disk",
                model_path=str(folder),
                load_format=LOAD_FORMAT,
                weight_version=version,
                timeout=self._options.send_timeout,
                draft=self.draft,
                urls=[url],
            )

        sending = send_to_each(
            control.urls,
            load,
            refusals=_NOTHING_LOADED,
            message=f"A server did not load {folder}. Does every server see that path?",
        )
        run_sync(sending)

    def _remove_old(self) -> None:
        """Removes all checkpoints of this package here but the latest."""
        try:
            marks = self._directory.glob(f"v*/{MARK}")
            by_age = sorted(marks, key=lambda mark: mark.stat().st_mtime_ns)
            for mark in by_age[:-KEPT]:
                self._remove(mark.parent)
        except OSError as error:
            # The servers have the new weights, so the update has succeeded.
            torchrl_logger.warning(f"Old weights could not be removed: {error}")

    def _remove_unfinished(self) -> None:
        """Removes the folders that a killed trainer left; the lock is held."""
        for folder in self._directory.glob(f"{UNFINISHED}*"):
            # A folder that was just made, or is half removed, has no mark.
            name = re.fullmatch("[0-9a-f]{32}", folder.name.removeprefix(UNFINISHED))
            if name and folder.is_dir():
                _delete(folder)

    def _remove(self, folder: Path) -> None:
        # No reader may find half of a checkpoint under its name.
        _delete(folder.rename(self._unfinished()))

    def _unfinished(self) -> Path:
        return self._directory / f"{UNFINISHED}{uuid.uuid4().hex}"

    @contextmanager
    def _before_servers(self) -> Iterator[None]:
        """Converts failures before the first request to untouched transfer errors."""
        try:
            yield
        except WeightTransferError as error:
            raise error.replace(untouched=True) from error.__cause__
        except Exception as error:
            message = f"No checkpoint could be written: {error}"
            if isinstance(error, (OSError, SafetensorError)):
                free = ""
                if self._directory.is_dir():
                    num_bytes = shutil.disk_usage(self._directory).free
                    free = f" There are {num_bytes / 1e9:.3g} GB left."
                message = (
                    f"Weights cannot be written to {self._directory}: {error}.{free} "
                    f"Make room, or give another directory."
                )
            raise WeightTransferError(message, untouched=True) from error


def _lock(directory: Path) -> int:
    """Keeps other trainers out of a directory, where the file system can."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise WeightTransferError(
            f"Another trainer is writing weights to {directory}; give each trainer "
            f"a directory of its own."
        ) from None
    except OSError as error:
        torchrl_logger.debug(f"{directory} cannot be locked: {error}")
    return handle


def _write_weights(weights: Weights, folder: Path, bucket_bytes: int) -> int:
    """Writes the tensors and their index; returns the number of files with tensors."""
    total = len(plan_buckets(weights.specs, bucket_bytes))
    files: dict[str, str] = {}
    for index, (bucket, tensors) in enumerate(read_buckets(weights, bucket_bytes)):
        name = f"model-{index + 1:05}-of-{total:05}.safetensors"
        views = bucket.view(flatten(bucket, tensors, CPU))
        # The bucket's memory must be free when the next one is made.
        del tensors
        save_file(views, folder / name, metadata={"format": "pt"})
        _sync(folder / name)
        files.update(dict.fromkeys(views, name))
        del views
    path = folder / "model.safetensors.index.json"
    content = {"metadata": {"total_size": weights.num_bytes}, "weight_map": files}
    path.write_text(json.dumps(content))
    _sync(path)
    return total


def _copy_model_files(model: str, folder: Path) -> None:
    """Copies the files that make weights a model: configuration, tokenizer, code."""
    source = _folder_of(model)
    if source is None:
        torchrl_logger.warning(
            f"The folder of the served model {model!r} cannot be read here, so the "
            f"checkpoints hold weights only; no server can be started from them."
        )
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)
            _sync(folder / path.name)


def _folder_of(model: str) -> Path | None:
    """Returns the folder of a model, which may be a hub name; downloads nothing."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, "config.json")
    except ValueError:  # ``model`` is not a hub name.
        return None
    return Path(path).parent if isinstance(path, str) else None


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        torchrl_logger.warning(f"{folder} could not be removed: {error}")


def checkpoint_path(engine: RLSGLangEngine) -> str:
    """Returns the path, as the servers see it, that they were started with."""
    capabilities = engine.capabilities
    if capabilities.args.load_format == "dummy":
        raise UnsupportedByServerError(
            "The servers were started with load_format='dummy', so there is no "
            "checkpoint to go back to; send them weights instead."
        )
    # A server that has loaded other files reports those as its model's path.
    return capabilities.args.model_path or capabilities.model_path


class CheckpointTransport(WeightTransport):
    """Makes every server load the files that it was started with."""

    name = "checkpoint"
    route = "disk"
    is_checkpoint = True

    def send(self, weights: Weights, *, version: str) -> int:
        """Loads the checkpoint; see :class:`.WeightTransport`."""
        control, path = self._engine.control, checkpoint_path(self._engine)
        try:
            run_sync(control.end_weight_update())
        except RequestRefusedError as error:
            # The usual case: no trainer has left its session open.
            torchrl_logger.debug(f"Before the checkpoint is loaded: {error}")
        loading = control.update_weights_from(
            "disk",
            model_path=path,
            weight_version=version,
            timeout=600.0,
        )
        try:
            run_sync(loading)
        except ServerError as error:
            # The weights before were not trusted, so the servers count as touched.
            raise WeightTransferError(
                f"The checkpoint {path!r} could not be loaded: {error}"
            ) from error
        return 1

"""Checkpoints of a run: a folder each, complete or not there.

Weights and optimizer are written by PyTorch's distributed checkpoint: each rank copies
its part to host memory, and writes it while training goes on. A run goes on with any
number of ranks.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from torchrl_sglang.errors import CheckpointError, ConfigurationError
from torchrl_sglang.support.checks import check_count
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.private_files import for_owner
from torchrl_sglang.trainers.ranks import TrainerRanks

Resume: TypeAlias = bool | Literal["auto"]
"""Whether a run goes on with the newest checkpoint; ``"auto"``: if there is one."""

ROLLOUTS = "rollouts.jsonl"

TRAINED = "model"

RESULTS = (ROLLOUTS, TRAINED, "best")
"""Names of the results of a run, beside its checkpoints."""

REST = "run.pt"
"""What a checkpoint holds besides weights and optimizer."""

WRITE_TIMEOUT_SECONDS = 3600.0
"""Wait for a checkpoint that is being written, before the next one or the end."""

_COMPLETE = re.compile(r"step_\d+")


class Checkpoints:
    """The newest checkpoints of a run.

    All ranks make one, and call :meth:`save`, :meth:`restore` and :meth:`wait`.

    Args:
        folder: folder of the run, visible to all ranks; created if missing.
        keep: number of checkpoints to keep.
        identity: values that a resumed run shares with its checkpoint.
        ranks: ranks of the trainer. Defaults to this process alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        identity: Mapping[str, Any],
        ranks: TrainerRanks | None = None,
    ) -> None:
        check_count("keep_checkpoints", keep, least=1)
        self._run = folder
        self._folder = folder / "checkpoints"
        self._keep = keep
        self._identity = dict(identity)
        self._ranks = ranks or TrainerRanks()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be the folder of a run: {error}. Give another output."
            ) from error
        # A group of its own: what is written in the background has collectives, too.
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            timeout = timedelta(seconds=WRITE_TIMEOUT_SECONDS)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._writing: tuple[Path, Future[None]] | None = None

    def paths(self) -> list[Path]:
        """Returns all complete checkpoints, the newest last."""
        folders = self._folder.glob("step_*")
        return sorted(path for path in folders if _COMPLETE.fullmatch(path.name))

    def load(self, resume: Resume) -> dict[str, Any] | None:
        """Returns the newest checkpoint's contents besides weights and optimizer.

        None if the run begins. Raises :class:`.ConfigurationError` if the folder and
        ``resume`` do not fit, or the checkpoint is of another run, and
        :class:`.CheckpointError` if it cannot be read.
        """
        paths = self.paths()
        if not resume:
            self._check_new(paths)
            return None
        if not paths:
            if resume is True:
                raise ConfigurationError(
                    f"resume=True, and {self._folder} has no checkpoint; give "
                    f"resume='auto' to begin if there is none."
                )
            trained = self._run / TRAINED
            if trained.exists():
                raise ConfigurationError(
                    f"{trained} is of an earlier run, which has no checkpoint to go on "
                    f"with; give another output, or move it."
                )
            return None
        state = _read_rest(paths[-1])
        for name, now in self._identity.items():
            saved = state["identity"].get(name)
            if saved != now:
                raise ConfigurationError(
                    f"{paths[-1]} was saved with {name}={saved!r}, and this run has "
                    f"{name}={now!r}; give the same, or another output."
                )
        return state

    def _check_new(self, paths: list[Path]) -> None:
        for path in (*paths, *(self._run / name for name in RESULTS)):
            if path.exists() and path.stat().st_size:
                raise ConfigurationError(
                    f"{path} is of an earlier run; give resume='auto' to go on with "
                    f"it, or another output."
                )

    def restore(self, learned: Any) -> None:
        """Reads weights and optimizer of the newest checkpoint; all ranks call it.

        Tensors of ``learned`` are read in place, spread over this run's ranks. Raises
        :class:`.CheckpointError` if the checkpoint does not fit, or cannot be read.
        """
        paths = self.paths()
        path = self._ranks.share(paths[-1] if paths else None)
        if path is None:
            raise CheckpointError(f"{self._folder} has no checkpoint to read.")
        try:
            state_dict_loader.load(
                {"learned": learned}, checkpoint_id=path, process_group=self._group
            )
        except (CheckpointException, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read into this run: {_say(error)} Give the model, "
                f"adapter and optimizer that it was saved with, or another output; if "
                f"it is damaged, remove it to go on with the one before."
            ) from error

    def save(
        self, step: int, learned: Any, rest: Mapping[str, Any] | None = None
    ) -> None:
        """Copies a state to host memory, and writes it in the background.

        All ranks call it; a kill at any time leaves the older checkpoint or this one.
        An unfinished write is waited for, and an existing checkpoint stays.

        Args:
            step: number of the checkpoint.
            learned: tensors, also DTensors, in dictionaries; or an object with
                ``state_dict`` and ``load_state_dict`` that has them.
            rest: further values of the first rank.

        Raises:
            CheckpointError: if the previous checkpoint could not be written, or this
                one cannot be begun.
            ConfigurationError: if a rank does not see the folder of the run.
        """
        self.wait()
        path = self._folder / f"step_{step:08}"
        partial = path.with_suffix(".partial")
        if self._ranks.first(lambda: self._begin(path, partial)):
            return
        if not self._ranks.all_true(partial.is_dir()):
            raise ConfigurationError(
                f"Some ranks of the trainer do not see {partial.absolute()}, which the "
                f"first one has made; give an output that is on storage of all nodes."
            )
        started = state_dict_saver.async_save(
            {"learned": learned},
            storage_writer=FileSystemWriter(partial),
            process_group=self._group,
        )
        if isinstance(started, Future):
            written = started
        else:
            started.staging_completion.result()
            written = started.upload_completion
        if self._ranks.is_first:
            buffer = io.BytesIO()
            torch.save(
                {**(rest or {}), "step": step, "identity": self._identity}, buffer
            )
            # The first rank is told when all have written their parts.
            written = _then(written, lambda: self._complete(partial, path, buffer))
        self._writing = path, written

    def _begin(self, path: Path, partial: Path) -> bool:
        """Makes the folder to write to; returns whether the checkpoint is there."""
        if path.exists():
            return True
        try:
            for old in self._folder.glob("*.partial"):
                _remove(old)
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written: {error}. Older ones are as "
                f"they were; make room, or give another output."
            ) from error
        return False

    def _complete(self, partial: Path, path: Path, rest: io.BytesIO) -> None:
        """Makes a checkpoint of the written files, and removes older checkpoints."""
        with open(partial / REST, "wb", opener=for_owner) as file:
            file.write(rest.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        partial.replace(path)
        _sync(self._folder)
        for old in self.paths()[: -self._keep]:
            # A kill meanwhile leaves no half of it under its name.
            away = old.with_suffix(".partial")
            old.replace(away)
            _remove(away)

    def wait(self) -> None:
        """Waits until all ranks have written the last checkpoint; all ranks call it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        path, written = writing
        problem = _problem(written, WRITE_TIMEOUT_SECONDS)
        if not self._ranks.all_true(problem is None):
            raise CheckpointError(
                f"The checkpoint {path} was not written: "
                f"{problem or 'another rank of the trainer says why.'} Older ones are "
                f"as they were; make room, or give another output."
            )

    def close(self) -> None:
        """Ends the communication of the ranks, after the last write; raises nothing."""
        writing, self._writing = self._writing, None
        if writing is not None:
            path, written = writing
            problem = _problem(written, WRITE_TIMEOUT_SECONDS)
            if problem is not None:
                torchrl_logger.warning(f"{path} was not written: {problem}")
        group, self._group = self._group, None
        if group is not None and (writing is None or written.done()):
            dist.destroy_process_group(group)


def _read_rest(path: Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint besides weights and optimizer."""
    try:
        state: dict[str, Any] = torch.load(
            path / REST, map_location="cpu", weights_only=False
        )
        # Otherwise it is no checkpoint of a run.
        _ = int(state["step"]), dict(state["identity"])
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged: {_say(error).rstrip('.')}. Remove it to go on with "
            f"the one before, or give another output."
        ) from error
    return state


def _problem(written: Future[None], timeout: float) -> str | None:
    """Returns why something was not written in time."""
    try:
        error = written.exception(timeout)
    except TimeoutError:
        return f"it took more than {timeout:g} seconds."
    return None if error is None else _say(error)


def _say(error: BaseException) -> str:
    """Returns an error as a message has it, on one line."""
    if not isinstance(error, CheckpointException):
        return " ".join(f"{type(error).__name__}: {error}".split())
    # Its text has the stacks of all ranks.
    failures = {rank: _say(failure) for rank, (failure, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())


def _then(written: Future[Any], call: Callable[[], None]) -> Future[None]:
    """Returns the future of a call in the background, after another one."""
    done: Future[None] = Future()

    def finish(_: Future[Any]) -> None:
        try:
            written.result()
            call()
        except BaseException as error:  # noqa: BLE001 - PyTorch's is one; it is raised.
            torchrl_logger.warning(f"A checkpoint could not be written: {_say(error)}")
            done.set_exception(error)
        else:
            done.set_result(None)

    written.add_done_callback(finish)
    return done


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on its disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def random_state() -> dict[str, Any]:
    """Returns the state of the random numbers of this process."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on with random numbers where a state was saved."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def forget_later_steps(folder: Path, step: int) -> None:
    """Removes rollouts and CSV metrics of a killed run after a checkpoint's step."""

    def is_earlier(line: str) -> bool:
        try:
            return bool(json.loads(line)["step"] <= step)
        except ValueError:
            # The last line of a killed run.
            return False

    def is_earlier_scalar(line: str) -> bool:
        number = re.match(r"(\d+),", line)
        return number is not None and int(number[1]) <= step

    _keep_lines(folder / ROLLOUTS, is_earlier)
    for path in (folder / "logs").rglob("scalars/**/*.csv"):
        _keep_lines(path, is_earlier_scalar)


def _keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    if not path.exists():
        return
    partial = path.with_suffix(".partial")
    with (
        # A kill may have cut the last line within a character.
        path.open(encoding="utf-8", errors="surrogateescape") as lines,
        open(
            partial, "w", encoding="utf-8", errors="surrogateescape", opener=for_owner
        ) as copied,
    ):
        copied.writelines(line for line in lines if keep(line))
    partial.replace(path)

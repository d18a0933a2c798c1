"""Prompts by position: the same position is the same prompt in every run.

A dataset is read by index, in an order that a seed decides; any other iterable is read
from its beginning, again and again, and a run that goes on skips what is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NoReturn, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch.utils.data import DataLoader, IterableDataset

from torchrl_sglang.collectors.scheduling.loader_batches import (
    read_batches,
    split_batch,
)
from torchrl_sglang.errors import ConfigurationError, TaskError, UserFunctionError
from torchrl_sglang.support.user_code import describe

Task = Mapping[str, Any]


class PromptStream(Protocol):
    """Tasks by position, which are asked for nearly in their order."""

    def fetch(self, position: int) -> Task | None:
        """Returns the task at a position; ``None`` if there is none.

        Raises:
            TaskError: if the element at this position is no task.
            ConfigurationError: if no tasks can be read, here or later.
            UserFunctionError: the same, for an error of the user's iterable.
        """

    def set_seed(self, seed: int) -> None:
        """Sets the seed of the order, before the first task is fetched."""

    def done(self, position: int) -> None:
        """Nobody will ask for this position again."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the order of the tasks."""

    def resume(
        self, state: Mapping[str, Any], position: int, still_open: Sequence[int]
    ) -> None:
        """Goes on at a position; of those before it, some may still be asked for."""


def is_read_by_index(given: Any) -> bool:
    """Returns whether tasks can be read, and shuffled, by their places."""
    by_index = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    # PyTorch gives the second kind a __getitem__ that only raises.
    return by_index and not isinstance(given, (DataLoader, IterableDataset))


@dataclass(frozen=True)
class Passes:
    """Prompts that end after so many passes; others are read again and again."""

    prompts: Any
    count: int

    @property
    def column_names(self) -> Any:
        """Columns of a dataset of Hugging Face's; ``None`` without them."""
        return getattr(self.prompts, "column_names", None)


def count_tasks(given: Any) -> int | None:
    """Returns the number of tasks of a pass; ``None`` if it is unknown."""
    try:
        if not isinstance(given, DataLoader) or given.batch_sampler is None:
            return len(given)
        if given.batch_size is None:
            # Batches of the user's own, of any size.
            return None
        if given.drop_last:
            return len(given) * given.batch_size
        is_stream = isinstance(given.dataset, IterableDataset)
        source: Any = given.dataset if is_stream else given.sampler
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def refuse_table(name: str, given: Any) -> None:
    """Refuses tables of pandas and all splits of a dataset, which have no rows."""
    kind = type(given).__name__
    library = type(given).__module__.partition(".")[0]
    if library == "pandas":
        raise ConfigurationError(
            f"{name} is a {kind} of pandas; give its rows, table.to_dict('records')."
        )
    if library == "datasets" and isinstance(given, Mapping):
        splits = list(given)
        raise ConfigurationError(
            f"{name} is a {kind} with the splits {', '.join(map(repr, splits))}; give "
            f"one of them, such as dataset[{next(iter(splits), 'train')!r}]."
        )


def make_prompts(
    prompts: Any, *, query_key: str, shuffle: bool, seed: int
) -> PromptStream:
    """Returns a dataset's, a data loader's or an iterable's tasks by position."""
    passes = None
    if isinstance(prompts, Passes):
        prompts, passes = prompts.prompts, prompts.count
    refuse_table("prompts", prompts)
    if isinstance(prompts, (str, Mapping)) or is_tensor_collection(prompts):
        raise ConfigurationError(
            f"prompts must be a dataset, a data loader or an iterable of tasks, got "
            f"one {type(prompts).__name__}; give a list of them."
        )
    if is_read_by_index(prompts):
        if not len(prompts):
            raise ConfigurationError("prompts is empty; give at least one task.")
        return _DatasetPrompts(
            prompts, query_key, shuffle=shuffle, seed=seed, passes=passes
        )
    if not isinstance(prompts, Iterable):
        raise ConfigurationError(
            f"prompts must be a dataset, a data loader or an iterable of tasks, got "
            f"{type(prompts).__name__}."
        )
    if shuffle:
        raise ConfigurationError(
            f"shuffle=True needs prompts that are read by index, and a "
            f"{type(prompts).__name__} is read in its own order; shuffle there, and "
            f"leave shuffle out."
        )
    return _IteratedPrompts(prompts, query_key, passes=passes)


class _DatasetPrompts:
    """Tasks of a dataset, epoch after epoch; ``passes`` ends them."""

    def __init__(
        self,
        dataset: Any,
        query_key: str,
        *,
        shuffle: bool,
        seed: int,
        passes: int | None,
    ) -> None:
        self._dataset = dataset
        self._query_key = query_key
        self._shuffle = shuffle
        # PyTorch takes no number of NumPy's.
        self._seed = int(seed)
        self._passes = passes
        self._orders: dict[int, list[int]] = {}

    def fetch(self, position: int) -> Task | None:
        epoch, place = divmod(position, len(self._dataset))
        if self._passes is not None and epoch >= self._passes:
            return None
        if self._shuffle:
            place = self._order(epoch)[place]
        element = self._dataset[place]
        try:
            return to_task(element, self._query_key)
        except ConfigurationError as error:
            raise TaskError(str(error)) from error

    def set_seed(self, seed: int) -> None:
        self._seed = int(seed)

    def done(self, position: int) -> None:
        """Does nothing: the dataset keeps its tasks."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "length": len(self._dataset),
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def resume(
        self, state: Mapping[str, Any], position: int, still_open: Sequence[int]
    ) -> None:
        """Takes the seed of the state; any task can be read."""
        for name, value in (("length", len(self._dataset)), ("shuffle", self._shuffle)):
            if state.get(name) != value:
                raise ConfigurationError(
                    f"The saved state is of prompts with {name}={state.get(name)}, and "
                    f"these have {name}={value}; give the prompts that it was saved "
                    f"with."
                )
        self._seed = int(state["seed"])
        self._orders = {}

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # Prompts that are started again can be of the epoch before.
            self._orders = {
                number: order
                for number, order in self._orders.items()
                if number == epoch - 1
            }
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(len(self._dataset), generator=generator)
            self._orders[epoch] = order.tolist()
        return self._orders[epoch]


class _IteratedPrompts:
    """Tasks of an iterable, which is iterated again when it ends; ``passes`` times.

    An iterator is not: it is its own beginning.
    """

    def __init__(
        self, iterable: Iterable[Any], query_key: str, *, passes: int | None
    ) -> None:
        self._iterable = iterable
        self._passes = repeat(None) if passes is None else repeat(None, passes)
        self._query_key = query_key
        self._tasks = self._iterate()
        self._next = 0
        self._open: dict[int, Task] = {}
        # Position and text of the last task that was read.
        self._last: tuple[int, str | None] = (-1, None)

    def fetch(self, position: int) -> Task | None:
        while self._next <= position:
            task = self._read()
            if task is None:
                return None
            self._open[self._next - 1] = task
        return self._open[position]

    def set_seed(self, seed: int) -> None:
        """Does nothing: the iterable has its own order."""

    def done(self, position: int) -> None:
        self._open.pop(position, None)

    def state_dict(self) -> dict[str, Any]:
        position, text = self._last
        return {"position": position, "text": text}

    def resume(
        self, state: Mapping[str, Any], position: int, still_open: Sequence[int]
    ) -> None:
        positions = set(still_open)
        saved = (state.get("position"), state.get("text"))
        while self._next < position:
            task = self._read()
            if task is None:
                raise ConfigurationError(
                    f"The prompts end at {self._next}, and the saved state goes on at "
                    f"{position}; give the prompts that it was saved with."
                )
            if self._last[0] == saved[0] and self._last != saved:
                raise ConfigurationError(
                    f"Prompt {saved[0]} was {saved[1]!r} when the state was saved, and "
                    f"is {self._last[1]!r} now; give the same prompts in the same "
                    f"order, to a shuffled DataLoader with a seeded generator."
                )
            if self._last[0] in positions:
                self._open[self._last[0]] = task

    def _read(self) -> Task | None:
        """Reads the next task; an iterable that failed fails from then on."""
        try:
            task = next(self._tasks, None)
        except Exception as error:  # noqa: BLE001 - It is raised with its place.
            named = isinstance(error, (ConfigurationError, UserFunctionError))
            failure = error if named else _reading_error(self._next, error)
            # Otherwise it would look as if it had ended.
            self._tasks = iter(partial(_raise, failure), None)
            raise failure from failure.__cause__
        if task is not None:
            self._last = (self._next, _text(task.get(self._query_key)))
            self._next += 1
        return task

    def _iterate(self) -> Iterator[Task]:
        for _ in self._passes:
            has_tasks = False
            for task in read_once(self._iterable):
                has_tasks = True
                yield to_task(task, self._query_key)
            if not has_tasks or isinstance(self._iterable, Iterator):
                return


def read_once(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yields the tasks of one pass; batches of a data loader are taken apart."""
    loader = iterable if isinstance(iterable, DataLoader) else None
    if loader is not None and loader.batch_sampler is None:
        loader = None
    for element in iterable if loader is None else read_batches(loader):
        if is_tensor_collection(element) and element.ndim:
            yield from element.unbind(0)
        elif loader is not None:
            yield from split_batch(element, loader)
        else:
            yield element


def to_task(element: Any, query_key: str) -> Task:
    """Returns an element of a dataset as a task."""
    if isinstance(element, str):
        return {query_key: element}
    if isinstance(element, TensorDictBase):
        return {str(name): _leaf(element, name) for name in element.keys()}
    if isinstance(element, Mapping):
        return element
    raise ConfigurationError(
        f"A task must be a text, a mapping or a TensorDict, got {element!r}."
    )


def _text(prompt: Any) -> str | None:
    """Returns a prompt as a text; ``None`` if it has no unique one."""
    try:
        return json.dumps(prompt)
    except (TypeError, ValueError):
        return None


def _reading_error(position: int, error: Exception) -> UserFunctionError:
    named = UserFunctionError(
        f"The iterable of prompts raised {describe(error)}, at prompt {position}; it "
        f"cannot be read on from there."
    )
    named.__cause__ = error
    return named


def _raise(error: Exception) -> NoReturn:
    raise error


def _leaf(td: TensorDictBase, name: str) -> Any:
    value = td.get(name)
    return value if isinstance(value, torch.Tensor) else getattr(value, "data", value)

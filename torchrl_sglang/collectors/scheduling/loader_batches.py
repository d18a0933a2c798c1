"""Takes the batches of a ``DataLoader`` apart: the inverse of its collate function."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.user_code import describe

_ADVICE = (
    "give DataLoader(..., collate_fn=list), whose batches are lists of unchanged tasks."
)


def read_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the batches of a data loader."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if not _is_from_collate(error):
                raise
            # The last line: a worker's error has its whole traceback as its text.
            reason = describe(error).splitlines()[-1]
            raise ConfigurationError(
                f"PyTorch's default_collate cannot put the tasks of a DataLoader into "
                f"a batch: {reason}; {_ADVICE}"
            ) from error
        yield batch


def split_batch(batch: Any, loader: DataLoader[Any]) -> list[Any]:
    """Returns the tasks that a data loader put into a batch.

    PyTorch's own collate function turns lists and mappings inside out, down to tensors
    and lists of texts. Any other one returns a list of tasks, or a mapping of columns
    with an entry for each task.
    """
    if isinstance(batch, (str, bytes, torch.Tensor)) or not hasattr(batch, "__iter__"):
        raise ConfigurationError(
            f"A DataLoader yields a {type(batch).__name__} instead of a list of tasks, "
            f"or a mapping of columns; {_ADVICE}"
        )
    if not isinstance(batch, Mapping):
        return list(batch)
    split: Callable[[Any, int], list[Any] | None]
    if loader.collate_fn is default_collate:
        size, split = _collated_size(batch), _uncollate
    else:
        size, split = _listed_size(batch), _entries
    columns = {name: split(column, size or 0) for name, column in batch.items()}
    for name, entries in columns.items():
        if entries is None:
            raise ConfigurationError(
                f"The column {name!r} of a DataLoader's batch cannot be divided into "
                f"the values of its {size} tasks; {_ADVICE}"
            )
    return _rows(columns.values(), lambda row: dict(zip(columns, row, strict=True)))


def _is_from_collate(error: BaseException) -> bool:
    """Returns whether an exception passed through PyTorch's collate functions."""
    # Errors of a worker have its traceback as their text.
    return "data/_utils/collate.py" in "".join(traceback.format_exception(error))


def _rows(columns: Any, build: Callable[[Any], Any], size: int = 0) -> list[Any]:
    rows = zip(*columns, strict=True) if columns else [()] * size
    return [build(row) for row in rows]


def _is_texts(column: Any) -> bool:
    return (
        isinstance(column, (list, tuple))
        and bool(column)
        and isinstance(column[0], (str, bytes))
    )


def _uncollate(column: Any, size: int) -> list[Any] | None:
    """Returns the values of a column of ``default_collate``; ``None`` if it is none."""
    if isinstance(column, torch.Tensor) or _is_texts(column):
        return list(column) if _length(column) == size else None
    build: Callable[[Any], Any] = list
    parts: Any = column
    if isinstance(column, Mapping):
        parts, build = column.values(), lambda row: dict(zip(column, row, strict=True))
    elif isinstance(column, (str, bytes)) or not isinstance(column, Sequence):
        return None
    elif hasattr(column, "_make"):
        build = column._make
    split = [_uncollate(part, size) for part in parts]
    return None if None in split else _rows(split, build, size)


def _collated_size(column: Any) -> int | None:
    """Returns the number of tasks of a column; ``None`` if it has no values."""
    if isinstance(column, torch.Tensor) or _is_texts(column):
        return _length(column)
    if isinstance(column, Mapping):
        column = column.values()
    elif isinstance(column, (str, bytes)) or not isinstance(column, Sequence):
        return None
    sizes = map(_collated_size, column)
    return next((size for size in sizes if size is not None), None)


def _entries(column: Any, size: int) -> list[Any] | None:
    """Returns the entries of a column of another collate function.

    ``None`` if there is not one for each task, or if ``default_collate``, which the
    function may call, could have made the same column of other values.
    """
    if isinstance(column, Mapping):
        return _uncollate(column, size)
    if isinstance(column, (str, bytes)) or not hasattr(column, "__getitem__"):
        return None
    if _length(column) != size:
        return None
    return None if _is_ambiguous(column, size) else [column[i] for i in range(size)]


def _is_ambiguous(column: Any, size: int) -> bool:
    """Returns whether a column with so many entries can also be turned inside out."""
    is_leaf = isinstance(column, torch.Tensor) or _is_texts(column)
    if is_leaf or _collated_size(column) is None:
        return False
    # PyTorch makes tuples of the texts in lists.
    if isinstance(column[0], list) and _is_texts(column[0]):
        return False
    return _uncollate(column, size) is not None


def _listed_size(batch: Mapping[Any, Any]) -> int | None:
    columns = [column for column in batch.values() if not isinstance(column, Mapping)]
    sizes = map(_length, columns or batch.values())
    return next((size for size in sizes if size is not None), None)


def _length(column: Any) -> int | None:
    try:
        return len(column)
    except TypeError:
        # Of a number, or a tensor without dimensions.
        return None

"""Recorded runs and sessions as ``datasets.Dataset``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import LazyStackedTensorDict

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.credit import check_discount, trained_rule
from torchrl_sglang.gateway.export import to_rows
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.policies.dataset import batch_to_dataset, import_datasets
from torchrl_sglang.recording.lines import GroupLine
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.recording.rows import read_rows
from torchrl_sglang.support.log import torchrl_logger

if TYPE_CHECKING:
    import datasets


def load_rollouts(
    path: str | os.PathLike[str], *, trained: Any = None, discount: float = 1.0
) -> datasets.Dataset:
    """Returns the rows of a recorded run, or of a gateway's file, as a dataset.

    Rows have the columns of :func:`.batch_to_dataset`, so that :func:`dataset_to_batch`
    makes a batch of them. Rows of a recording have no columns of the task and no token
    columns, and beside the others:

    - ``group``: name of the group, which responses to a prompt share.
    - ``position``: number of the prompt in the run, over all epochs.
    - ``policy_version``: oldest of the ``weight_versions`` that are trained.
    - ``status``: ``"complete"``, ``"filtered"``, ``"held-out"`` or ``"session"``.
    - ``session``: name of a gateway's session.

    Rows are as they were when their group was complete, before ``on_stale`` masks some.
    Messages have ``tool_calls`` as JSON there, and ``weight_versions`` counts the
    collector's updates.

    Args:
        path: output of a :class:`.GRPO` run, folder of a :class:`.RunRecorder`, or the
            ``path`` of a :class:`.Gateway` that is shut down.

    Keyword Args:
        trained: of the gateway whose file it is; defaults to None, all turns.
        discount (float): of the gateway whose file it is. Defaults to 1.

    Raises:
        ConfigurationError: if there are no rows at this path, a gateway has the file
            open, or `datasets` is not installed.

    Examples:
        >>> dataset = load_rollouts("runs/x")  # doctest: +SKIP
        >>> good = dataset.filter(lambda row: row["reward"] > 0)  # doctest: +SKIP
        >>> loss(dataset_to_batch(good))  # doctest: +SKIP
    """
    rule, factor = trained_rule(trained), check_discount(discount)
    file = Path(path).expanduser()
    if not file.is_file():
        if trained is not None or factor != 1.0:
            raise ConfigurationError(
                f"trained= and discount= are for a gateway's file; the rows in "
                f"{str(file)!r} have the rewards of their run."
            )
        return _of_recording(Recording.open(file))
    store = Store(file)
    sessions = store.load()
    store.close()
    for session in sessions:
        session.is_trained, session.discount = rule, factor
    rows = to_rows(sessions)
    if not rows:
        raise ConfigurationError(f"{str(file)!r} has no session with a trained turn.")
    return batch_to_dataset(LazyStackedTensorDict(*rows))


def _of_recording(recording: Recording) -> datasets.Dataset:
    library = import_datasets()
    rows = list(_rows(recording))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return library.Dataset.from_dict(columns)


def _rows(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yields the rows of all groups with recorded tokens."""
    count = 0
    for group in recording.groups:
        rows = _rows_of(recording, group)
        count += not rows
        yield from rows
    folder, total = str(recording.folder), len(recording.groups)
    if count == total:
        raise ConfigurationError(
            f"None of {total} groups in {folder!r} has tokens of its rows. Record with "
            f"prompts=True, responses=True, and this version of the package."
        )
    if count:
        torchrl_logger.warning(
            f"{count} of {total} groups in {folder!r} are not in the dataset: their "
            f"conversations were not recorded, made room for newer ones, or are "
            f"damaged."
        )


def _rows_of(recording: Recording, group: GroupLine) -> list[dict[str, Any]]:
    texts = recording.read_texts(group.texts)
    try:
        return list(read_rows(group, texts)) if texts is not None else []
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return []

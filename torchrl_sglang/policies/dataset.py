"""Batches as ``datasets.Dataset``, with TRL's column names, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.utils import _is_non_tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies import outputs

if TYPE_CHECKING:
    import datasets

ENDS = ("done", "terminated", "truncated")
"""Columns of the end of a row's conversation."""

DERIVED = frozenset(
    {
        *("tokens", "masks", "log_probs", "history", "text", "next"),
        *ENDS,
    }
)
"""Columns of a batch that the table's columns replace."""

COLUMNS = frozenset(
    {
        *("prompt", "completion", "prompt_ids", "completion_ids", "env_mask"),
        *("logprobs", "reward", *ENDS),
    }
)
"""Columns of a table that are not the batch's own."""

NAMED = "reward."
"""Prefix of the column of a reward function with a name."""

OF_TOKENS = frozenset(
    {"advantage", "token_policy_version", "turn_returns", "turn_rewards"}
)
"""Columns with a value for each token after the prompt."""

OWN = "batch."
"""Prefix of a batch's own column with the name of a table's column."""

METRIC = "metrics."
"""Prefix of the column of a number for logs."""

PREFIXES = (NAMED, METRIC)

VERSIONS = "generation_info.weight_version"

INTEGERS = frozenset({"weight_versions", "token_policy_version"})
"""Columns of integers, also of a row without a token."""


def batch_to_dataset(batch: TensorDictBase) -> datasets.Dataset:
    """Returns a batch of a collector, a wrapper or a gateway as a dataset.

    Padding is removed. A row has:

    - ``prompt``, ``completion``: lists of messages with ``role`` and ``content``, where
      an agent's completion has later messages, too; texts if the batch has no messages.
    - ``prompt_ids``, ``completion_ids``: token ids of the prompt, and of everything
      after it.
    - ``env_mask``: 1 for the policy's tokens of ``completion_ids``, 0 for others.
    - ``logprobs``: log-probs of ``completion_ids``, in nats; 0 where the mask is 0.
    - ``weight_versions``: version of the weights that drew each of ``completion_ids``;
      -1: unknown, or of another's token.
    - ``reward``: sum of the rewards; ``reward.NAME``: value of a function with a name.
    - ``metrics.NAME``: a number for logs, of ``("next", "metrics", NAME)``.
    - ``done``, ``terminated``, ``truncated``: whether it is the last row of its
      conversation, which came to its end, or was cut off.

    The batch's other columns follow under their own names, nested ones with dots; after
    ``batch.`` if a column above has the name.

    Args:
        batch: of shape ``(B,)``, with ``("tokens", "full")`` and masks.

    Returns:
        datasets.Dataset: B rows. Numbers are 64 bits wide; :func:`dataset_to_batch`
            makes floats of 32 bits.

    Raises:
        ConfigurationError: if it has no rows, tokens or masks, or a value that a table
            cannot hold; or if `datasets` is not installed.

    Examples:
        >>> batch = next(iter(collector))  # doctest: +SKIP
        >>> dataset = batch_to_dataset(batch)  # doctest: +SKIP
        >>> dataset.to_parquet("rollouts.parquet")  # doctest: +SKIP
    """
    table = import_datasets().Dataset
    if 0 in batch.shape:
        raise ConfigurationError("The batch has no rows.")
    rows = [_to_row(row) for row in batch.reshape(-1).unbind(0)]
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return table.from_dict(
            {name: [row.get(name) for row in rows] for name in names}
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"The batch is not a table: {error}. Leave such a column out with "
            f"batch.exclude(...)."
        ) from error


def dataset_to_batch(dataset: datasets.Dataset) -> TensorDictBase:
    """Returns the batch of a dataset of :func:`batch_to_dataset`.

    Returns:
        TensorDictBase: of shape ``(B,)``, not padded, such as for a loss.

    Raises:
        ConfigurationError: if a column is missing.

    Examples:
        >>> batch = dataset_to_batch(dataset)  # doctest: +SKIP
        >>> loss(batch)  # doctest: +SKIP
    """
    missing = {"prompt_ids", "completion_ids", "env_mask", "logprobs"} - set(
        dataset.column_names
    )
    if missing:
        raise ConfigurationError(
            f"The dataset has no column {', '.join(sorted(missing))}; its columns are "
            f"{', '.join(dataset.column_names)}."
        )
    return LazyStackedTensorDict(*map(_from_row, dataset))


def _to_row(row: TensorDictBase) -> dict[str, Any]:
    try:
        full = row["tokens", "full"]
        written = row["masks", "all_assistant_mask"]
        valid = row["masks", "all_attention_mask"]
        log_probs = row["log_probs", "response"]
    except KeyError as error:
        raise ConfigurationError(
            f"The batch cannot be a table: {error.args[0]} A batch of a collector, a "
            f"gateway, or a wrapper with return_log_probs=True has tokens, masks and "
            f"log-probs."
        ) from error
    length = len(full) - len(log_probs)
    response = slice(length, None)
    is_token = valid[response]
    prompt, completion = _conversation(row, "prompt"), _conversation(row, "response")
    columns = {
        "prompt": prompt,
        "completion": completion,
        "prompt_ids": full[:length][valid[:length]].tolist(),
        "completion_ids": full[response][is_token].tolist(),
        "env_mask": written[response][is_token].int().tolist(),
        "logprobs": log_probs.where(written[response], 0.0)[is_token].tolist(),
    }
    columns |= _outcome(row)
    task = row.exclude(*DERIVED)
    for key in task.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
        path = (key,) if isinstance(key, str) else key
        name = ".".join(path)
        if name in COLUMNS or name == "weight_versions" or name.startswith(PREFIXES):
            name = OWN + name
        columns[name] = _plain(path, row.get(key), valid, length)
    if VERSIONS in columns:
        columns["weight_versions"] = columns.pop(VERSIONS)
    return columns


def _outcome(row: TensorDictBase) -> dict[str, Any]:
    """Returns the rewards of a row, and the end of its conversation."""
    following = row.get("next", {})
    if (reward := following.get("reward", None)) is None:
        return {}
    # A task's columns are in the row, too.
    following = following.exclude(*row.exclude(*DERIVED).keys())
    named = _numbers(following.exclude("reward"), NAMED)
    named |= _numbers(following.get("metrics", {}), METRIC)
    ends = {name: bool(following[name].all()) for name in ENDS if name in following}
    return {"reward": reward.sum().item(), **named, **ends}


def _numbers(columns: Any, prefix: str) -> dict[str, float]:
    """Returns the columns of a float for each row, under names with a prefix."""
    return {
        f"{prefix}{name}": value.item()
        for name, value in columns.items()
        if isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.shape == (1, 1)
    }


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) or _is_non_tensor(kind)


def _plain(path: Sequence[str], value: Any, valid: torch.Tensor, length: int) -> Any:
    """Returns a value of a row; padding is left out of a value for each token."""
    if not isinstance(value, torch.Tensor):
        return value.tolist() if hasattr(value, "tolist") else value.data
    if len(path) > 1 or path[0] in OF_TOKENS:
        part = {"full": slice(None), "prompt": slice(length)}
        is_token = valid[part.get(path[-1], slice(length, None))]
        if value.ndim and len(value) == len(is_token):
            value = value[is_token]
    return value.tolist()


def _conversation(row: TensorDictBase, part: str) -> Any:
    """Returns messages or a text; ``None``: the batch has tokens alone."""
    history = row.get(("history", part), None)
    if history is not None:
        pairs = zip(history.role, history.content, strict=True)
        return [{"role": role, "content": content} for role, content in pairs]
    text = row.get(("text", part), None)
    return getattr(text, "data", text)


def _from_row(row: Mapping[str, Any]) -> TensorDict:
    sample: dict[str, Any] = {**_tokens(row), **_conversations(row)}
    plain: dict[tuple[str, ...], Any] = {}
    for column, value in row.items():
        if column in COLUMNS or column.startswith(PREFIXES) or value is None:
            continue
        name = VERSIONS if column == "weight_versions" else column.removeprefix(OWN)
        container, *fields = name.split(".")
        if len(fields) == 1:
            sample.setdefault(container, {})[fields[0]] = _to_value(value, column)
        else:
            plain[container, *fields] = _to_value(value, column)
    containers = outputs.assemble(
        [sample], (), pad_output=False, padding_value=0, device=None
    )
    result = outputs.unchecked(containers)
    for key, value in plain.items():
        result.set(key, value)
    if row.get("reward") is not None:
        result.update(outputs.ends())
        result["next"] = outputs.unchecked(_following(row))
    return result


def _following(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rewards of a row and its end; by default a whole conversation's."""
    done, truncated = row.get("done") is not False, bool(row.get("truncated"))
    terminated = row.get("terminated")
    if terminated is None:
        terminated = done and not truncated
    numbers: dict[str, Any] = _of_prefix(row, NAMED)
    numbers["reward"] = torch.full((1, 1), row["reward"], dtype=torch.float32)
    if metrics := _of_prefix(row, METRIC):
        numbers["metrics"] = outputs.unchecked(metrics)
    ends = outputs.ends(terminated=terminated, truncated=truncated)
    return {**numbers, **ends, "done": torch.full((1,), done)}


def _of_prefix(row: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the numbers in columns with a prefix, by name."""
    return {
        column.removeprefix(prefix): torch.full((1, 1), value, dtype=torch.float32)
        for column, value in row.items()
        if column.startswith(prefix) and value is not None
    }


def _tokens(row: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    prompt, response = (
        torch.tensor(row[name], dtype=torch.int64)
        for name in ("prompt_ids", "completion_ids")
    )
    mask = torch.tensor(row["env_mask"], dtype=torch.bool)
    log_probs = torch.tensor(row["logprobs"], dtype=torch.float32)
    # Losses exclude tokens without a log-prob.
    log_probs[~mask] = math.nan
    written = torch.cat([torch.zeros_like(prompt, dtype=torch.bool), mask])
    unread = torch.full(prompt.shape, math.nan)
    return {
        "tokens": {
            "prompt": prompt,
            "response": response,
            "full": torch.cat([prompt, response]),
        },
        "masks": {
            "all_attention_mask": torch.ones_like(written),
            "all_assistant_mask": written,
        },
        "log_probs": {"response": log_probs, "full": torch.cat([unread, log_probs])},
    }


def _conversations(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    prompt: Any = row.get("prompt")
    completion: Any = row.get("completion")
    if prompt is None or type(prompt) is not type(completion):
        return {}
    parts = {
        "prompt": prompt,
        "response": completion,
        "full": prompt + completion,
    }
    if isinstance(prompt, str):
        texts = {name: outputs.non_tensor(text) for name, text in parts.items()}
        return {"text": texts}
    return {
        "history": {
            name: outputs.to_history(
                [outputs.to_message(message) for message in messages]
            )
            for name, messages in parts.items()
        }
    }


def _to_value(value: Any, column: str) -> Any:
    """Returns numbers as tensors, and others as non-tensor data."""
    if column in INTEGERS:
        return torch.tensor(value, dtype=torch.int64)
    tensor = None
    if not isinstance(value, (str, Mapping)):
        with suppress(TypeError, ValueError):
            tensor = torch.tensor(value)
    if tensor is None:
        return outputs.non_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor


def import_datasets() -> Any:
    """Returns the package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            "Datasets need the package datasets: pip install datasets."
        ) from error
    return datasets

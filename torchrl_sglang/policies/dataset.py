"""Batches as ``datasets.Dataset``, with TRL's column names, and back.

=====================  ===============================================================
Column                 Value of a row
=====================  ===============================================================
``prompt``             messages with ``role`` and ``content``, or a text
``completion``         the same for the response, with an agent's later messages
``prompt_ids``         token ids of the prompt
``completion_ids``     token ids of everything after the prompt
``env_mask``           1 for the policy's tokens of ``completion_ids``, 0 for others
``logprobs``           log-probs of ``completion_ids``, in nats; 0 where the mask is 0
``weight_versions``    version of the weights of each of ``completion_ids``; -1: none
``reward``             sum of the rewards
``done``               whether it is the last row of its conversation
=====================  ===============================================================

The batch's other columns follow under their own names, nested ones with dots; after
``batch.`` if a column above has the name.
"""

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

DERIVED = frozenset(
    {
        *("tokens", "masks", "log_probs", "history", "text", "next"),
        *("done", "terminated", "truncated"),
    }
)
"""Columns of a batch that the table's columns replace."""

COLUMNS = frozenset(
    {
        *("prompt", "completion", "prompt_ids", "completion_ids", "env_mask"),
        *("logprobs", "reward", "done"),
    }
)
"""Columns of a table that are not the batch's own."""

OF_TOKENS = frozenset({"advantage", "policy_versions", "turn_returns", "turn_rewards"})
"""Columns with a value for each token after the prompt."""

OWN = "batch."
"""Prefix of a batch's own column with the name of a table's column."""

VERSIONS = "generation_info.weight_version"


def batch_to_dataset(batch: TensorDictBase) -> datasets.Dataset:
    """Returns a batch of a collector, a wrapper or a gateway as a dataset.

    Padding is removed.

    Args:
        batch: of shape ``(B,)``, with ``("tokens", "full")`` and masks.

    Returns:
        datasets.Dataset: B rows, with the columns of this module's table. Numbers are
            64 bits wide; :func:`dataset_to_batch` makes floats of 32 bits.

    Raises:
        ConfigurationError: if it has no rows, tokens or masks, or a value that a table
            cannot hold; or if `datasets` is not installed.

    Examples:
        >>> batch = next(iter(collector))  # doctest: +SKIP
        >>> dataset = batch_to_dataset(batch)  # doctest: +SKIP
        >>> dataset.to_parquet("rollouts.parquet")  # doctest: +SKIP
    """
    table = _import_datasets().Dataset
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
    following = row.get("next", {})
    if (reward := following.get("reward", None)) is not None:
        columns["reward"] = reward.sum().item()
        columns["done"] = bool(following.get("done", torch.tensor(True)).all())
    task = row.exclude(*DERIVED)
    for key in task.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
        path = (key,) if isinstance(key, str) else key
        name = ".".join(path)
        if name in COLUMNS or name == "weight_versions":
            name = OWN + name
        columns[name] = _plain(path, row.get(key), valid, length)
    if VERSIONS in columns:
        columns["weight_versions"] = columns.pop(VERSIONS)
    return columns


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
        if column in COLUMNS or value is None:
            continue
        name = VERSIONS if column == "weight_versions" else column.removeprefix(OWN)
        container, *fields = name.split(".")
        if len(fields) == 1:
            sample.setdefault(container, {})[fields[0]] = _to_value(value)
        else:
            plain[container, *fields] = _to_value(value)
    result = outputs.unchecked(
        {
            **outputs.assemble(
                [sample], (), pad_output=False, padding_value=0, device=None
            ),
        }
    )
    for key, value in plain.items():
        result.set(key, value)
    if row.get("reward") is not None:
        is_end = bool(row.get("done", True))
        reward = torch.full((1, 1), row["reward"], dtype=torch.float32)
        result.update(_ends(value=False))
        result["next"] = outputs.unchecked({"reward": reward, **_ends(value=is_end)})
    return result


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


def _to_value(value: Any) -> Any:
    """Returns numbers as tensors, and others as non-tensor data."""
    tensor = None
    if not isinstance(value, (str, Mapping)):
        with suppress(TypeError, ValueError):
            tensor = torch.tensor(value)
    if tensor is None:
        return outputs.non_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor


def _ends(*, value: bool) -> dict[str, torch.Tensor]:
    return {
        "done": torch.full((1,), value),
        "terminated": torch.full((1,), value),
        "truncated": torch.zeros(1, dtype=torch.bool),
    }


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            "batch_to_dataset needs the package datasets: pip install datasets."
        ) from error
    return datasets

"""Tables of sampled responses for loggers that show tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.objectives.advantages import REWARD
from torchrl_sglang.requests.token_columns import ASSISTANT_MASK, POLICY_VERSIONS

TABLE = "samples/responses"
"""Name of the table."""

MOST_ROWS = 16
"""Rows of a step: those with the least and the greatest rewards."""

MOST_CHARACTERS = 4000
"""Characters of a text in a table; the end is left out, of a prompt the beginning."""

COLUMNS = ("step", "prompt", "response", "reward", "advantage", "policy_version")
"""Columns of a table; each is a key of a row."""


def rows_of(
    step: int, batch: TensorDictBase, query_key: str
) -> Iterator[dict[str, Any]]:
    """Yields a row for each response of a batch with advantages.

    It has ``step``, ``prompt``, ``response``, ``reward``, ``advantage``,
    ``policy_version`` and ``tokens``, see :func:`count_written`.
    """
    for row in batch.unbind(0):
        version = row.get("policy_version", None)
        yield {
            "step": step,
            "prompt": plain(row.get(query_key, None)),
            "response": said_in(row),
            "reward": row[REWARD].sum().item(),
            "advantage": row["advantage"].mean().item(),
            "policy_version": None if version is None else int(version),
            "tokens": count_written(row),
        }


def count_written(row: TensorDictBase) -> int:
    """Returns how many tokens of a row's response the policy wrote.

    The response of an agent also has what was said to it between its turns, and can
    begin with turns of an earlier row: its assistant mask is of neither.
    """
    length, versions = len(row["tokens", "response"]), row.get(POLICY_VERSIONS, None)
    if versions is None or (versions >= 0).all():
        return length
    return int(row[ASSISTANT_MASK][-length:].sum())


def said_in(row: TensorDictBase) -> Any:
    """Returns the response of a row as text, or ``None`` if it has none.

    Of an agent it is all that follows the first prompt, a line ``role:
    content`` for each message, with calls as the model wrote them.
    """
    text = row.get("text", None)
    if text is not None:
        return plain(text.response)
    history = row.get("history", None)
    if history is None:
        return None
    response = history.response
    pairs = zip(response.role, response.content, strict=True)
    return "\n".join(f"{role}: {content}" for role, content in pairs)


def plain(value: Any) -> Any:
    """Returns a text or messages as JSON has them."""
    value = getattr(value, "data", value)
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def choose_rows(
    rows: Sequence[Mapping[str, Any]], most: int = MOST_ROWS
) -> list[list[Any]]:
    """Returns the rows of a table, by their rewards, the least first.

    Examples:
        >>> base = {"step": 1, "prompt": "2+2=", "advantage": 0.0, "policy_version": 3}
        >>> rows = [{**base, "response": str(n), "reward": n} for n in range(5)]
        >>> [row[2] for row in choose_rows(rows, 2)]
        ['0', '4']
    """
    ordered = sorted(rows, key=lambda row: row["reward"])
    if len(ordered) > most:
        half = most // 2
        ordered = [*ordered[:half], *ordered[len(ordered) - (most - half) :]]
    return [[_cell(name, row[name]) for name in COLUMNS] for row in ordered]


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, (int, float, type(None))):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MOST_CHARACTERS:
        return text
    # A prompt is known by its question, which is its end.
    is_prompt = name == "prompt"
    cut = text[-MOST_CHARACTERS:] if is_prompt else text[:MOST_CHARACTERS]
    return f"...{cut}" if is_prompt else f"{cut}..."


def log_samples(logger: Any, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Logs a table of rows of :func:`rows_of`, with a logger that shows tables.

    W&B and Trackio have a table, MLflow an artifact ``samples.json`` that grows, and
    TensorBoard a text. Others, such as CSV, have none: ``rollouts.jsonl`` has all.
    """
    write = _TABLES.get(type(logger).__name__)
    if write is not None and rows:
        write(logger, choose_rows(rows), step)


def _to_table(library: str, logger: Any, rows: list[list[Any]], step: int) -> None:
    table = import_module(library).Table(columns=list(COLUMNS), data=rows)
    logger.log_metrics({TABLE: table}, step)


def _to_mlflow(logger: Any, rows: list[list[Any]], step: int) -> None:
    import mlflow

    columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
    run = logger.experiment.info.run_id
    mlflow.log_table(columns, artifact_file="samples.json", run_id=run)


def _to_tensorboard(logger: Any, rows: list[list[Any]], step: int) -> None:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    text = "\n".join("|".join(map(_markdown, line)) for line in lines)
    logger.experiment.add_text(TABLE, text, global_step=step)


def _markdown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


_TABLES: Mapping[str, Callable[[Any, list[list[Any]], int], None]] = {
    "WandbLogger": partial(_to_table, "wandb"),
    "TrackioLogger": partial(_to_table, "trackio"),
    "MLFlowLogger": _to_mlflow,
    "TensorboardLogger": _to_tensorboard,
}
"""TorchRL's class of a logger -> how it gets a table."""

"""Reads the files of the served model on this machine.

A server that loaded weights from a folder names that folder as its model from then on.
The folder is removed when newer weights are written, so a mark in it names the model
that the server was started with.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "MARK",
    "load_model_config",
    "original_model",
    "read_model",
    "unreadable",
    "write_mark",
]

MARK = ".torchrl_sglang"
"""Name of the file in a folder that this package made and may remove."""

_IMPORTING = threading.Lock()


def write_mark(folder: Path, model: str) -> None:
    """Marks a folder with the model that its weights continue."""
    (folder / MARK).write_text(json.dumps({"model": model}))


def original_model(path: str) -> str:
    """Returns the model that a checkpoint continues; ``path`` where it has no mark."""
    try:
        return str(json.loads((Path(path) / MARK).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return path


def read_model(
    model: str | None,
    served: str,
    started: str,
    trust_remote_code: bool,
    revision: str | None,
) -> tuple[str, int, tuple[int, ...]]:
    """Returns the readable model path, its vocabulary size and its end tokens."""
    # A revision belongs to the name that the server was started with.
    revision = None if model else revision
    try:
        config = load_model_config(model or served, trust_remote_code, revision)
    except ConfigurationError:
        if model or started == served:
            raise
        served = started
        config = load_model_config(started, trust_remote_code, revision)
    vocab_size = int(config.get_text_config().vocab_size)
    return served, vocab_size, find_eos_token_ids(config, model or served, revision)


def load_model_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Returns the Hugging Face configuration of a folder or a hub name."""
    # Each server's model is read in its own thread, and the modules that transformers
    # loads lazily fail in one thread while another one loads them.
    with _IMPORTING:
        from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except Exception as error:
        raise unreadable(
            f"The configuration of the served model {model!r}",
            error,
            trust_remote_code,
            "pass model=... with a folder or hub name that has the same config.json.",
        ) from error


def unreadable(
    what: str, error: Exception, trust_remote_code: bool, advice: str
) -> ConfigurationError:
    """Returns the error for files that transformers cannot read here."""
    reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); {advice}"
    if not trust_remote_code and "trust_remote_code" in str(error):
        reason = (
            "without running the code that comes with it. If you trust that code, give "
            "from_pretrained or connect trust_remote_code=True."
        )
    return ConfigurationError(f"{what} cannot be read from here {reason}")


def find_eos_token_ids(
    config: Any, model: str, revision: str | None = None
) -> tuple[int, ...]:
    """Returns the tokens that end a response: a server takes those of both files."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(
            model, revision=revision or "main"
        ).eos_token_id
    except OSError:  # Most models have the file, and none must.
        generation = None
    found: set[int] = set()
    for ids in (config.get_text_config().eos_token_id, generation):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))

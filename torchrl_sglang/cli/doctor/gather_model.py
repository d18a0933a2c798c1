"""Finding out what is in a model's folder, without loading any of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchrl_sglang.cli.doctor.facts import ModelFacts

__all__ = ["gather_model"]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

POINTER = b"version https://git-lfs"
"""How a file begins that stands for one that was not downloaded."""


def gather_model(name: str) -> ModelFacts:
    """Returns what is in a folder, or in the cache of the hub for a name.

    Args:
        name: folder or hub name.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        cached = _cached(name)
        if cached is None:
            return ModelFacts(name=name, folder=None)
        folder = cached
    try:
        config = _read(folder / "config.json")
    except (OSError, ValueError) as error:
        return ModelFacts(name=name, folder=str(folder), config_error=str(error))
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    keys = ("dtype", "torch_dtype")
    dtypes = [c[key] for c in (config, inner) for key in keys if c.get(key)]
    weights = sorted({file for mark in WEIGHTS for file in folder.glob(mark)})
    return ModelFacts(
        name=name,
        folder=str(folder),
        model_type=config.get("model_type"),
        dtype=str(dtypes[0]) if dtypes else None,
        has_tokenizer=any((folder / file).is_file() for file in TOKENIZERS),
        has_chat_template=_has_chat_template(folder),
        weight_bytes=sum(file.stat().st_size for file in weights if file.is_file()),
        missing_files=_missing(folder),
        pointer_files=tuple(file.name for file in weights if _is_pointer(file)),
    )


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # It is no hub name.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _has_chat_template(folder: Path) -> bool:
    if any(folder.glob("chat_template.*")):
        return True
    try:
        return bool(_read(folder / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError):
        return False


def _missing(folder: Path) -> tuple[str, ...]:
    wanted: set[str] = set()
    for index in folder.glob("*.index.json"):
        try:
            wanted.update(_read(index).get("weight_map", {}).values())
        except (OSError, ValueError):
            continue
        # One complete format is enough.
        if all((folder / file).exists() for file in wanted):
            return ()
    return tuple(sorted(file for file in wanted if not (folder / file).exists()))


def _is_pointer(file: Path) -> bool:
    try:
        with open(file, "rb") as content:
            return content.read(len(POINTER)) == POINTER
    except OSError:
        return False

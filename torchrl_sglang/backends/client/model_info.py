"""Reads the served model's files here: configuration, tokenizer, parameters.

SGLang has no route for a list of parameters. Its weight loaders expect the names of a
checkpoint, so the Hugging Face model is built without memory (on the meta device) and
its saved names are listed. They can differ from the module's: transformers fuses the
experts of a layer on loading. A loader silently drops a fused name.

After a load from a folder, a server reports this folder as its model. The folder is
removed when newer weights are written; a mark in it names the original model.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import (
    ExpertShape,
    FusedParameter,
    ModelMetadata,
    ServerCapabilities,
    TensorPart,
)

MARK = ".torchrl_sglang"
"""Name of the marker file in a folder of this package, which may be removed."""

_EXPERT_COUNTS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
)
"""Configuration fields with the number of experts."""

_IMPORTING = threading.Lock()


class ServedModel:
    """Reads the files of the served model on this machine, each once.

    ``path`` is a folder or hub name with them, where the server's own cannot be read.
    """

    def __init__(
        self,
        capabilities: ServerCapabilities,
        path: str | None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        path = path and os.path.expanduser(path)
        self.path = path or capabilities.model_path
        self._given = bool(path)
        self._dtype = capabilities.dtype
        self._tokenizer_path = path or capabilities.tokenizer_path
        self._trusted = trust_remote_code
        # The revision belongs to the server's original model name.
        self._revision = None if path else capabilities.args.revision
        self._tokenizer: Any = None
        self._metadata: ModelMetadata | None = None

    def get_tokenizer(self, name: str | None = None) -> Any:
        """Returns the served model's tokenizer, loaded once, or another tokenizer."""
        if name is None and self._tokenizer is not None:
            return self._tokenizer
        from transformers import AutoTokenizer

        path = name or self._tokenizer_path
        if name is None:
            self._check_place(path)
        revision = None if name else self._revision
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=self._trusted, revision=revision or "main"
            )
        except Exception as error:
            if name is not None and "trust_remote_code" not in str(error):
                raise  # TorchRL's wrappers raise it, too.
            raise unreadable(
                f"The tokenizer {path!r}",
                error,
                self._trusted,
                "pass a tokenizer, or connect(..., model=...) with a folder that "
                "holds it.",
            ) from error
        if name is None:
            self._tokenizer = tokenizer
        return tokenizer

    def get_metadata(self) -> ModelMetadata:
        """Returns (dtype, shape) of every parameter under its checkpoint's name."""
        if self._metadata is None:
            self._metadata = metadata_from_config(
                self._load_config(), self._dtype, trust_remote_code=self._trusted
            )
        return dict(self._metadata)

    def get_fused_parameters(self) -> dict[str, FusedParameter]:
        """Returns the parameters whose layout differs between module and checkpoint."""
        return fused_from_config(self._load_config(), trust_remote_code=self._trusted)

    def _load_config(self) -> Any:
        self._check_place(self.path)
        return load_model_config(self.path, self._trusted, self._revision)

    def _check_place(self, path: str) -> None:
        # A copy of the engine can be in another folder than the engine.
        if not self._given:
            check_unambiguous(path)


def metadata_from_config(
    config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False
) -> ModelMetadata:
    """Returns (dtype, shape) of every parameter, without repeated tied parameters."""
    model = _build(config, trust_remote_code)
    served = dtype or getattr(config, "dtype", None) or torch.float32
    held = _tensors(model)
    metadata: ModelMetadata = {}
    for name, saved in _saved(model).items():
        # Buffers keep their trained precision.
        exact = name in held and not isinstance(held[name], torch.nn.Parameter)
        kind = held[name].dtype if exact else served
        metadata |= {part_name: (kind, part.shape) for part_name, part in saved.items()}
    return metadata


def fused_from_config(
    config: Any, *, trust_remote_code: bool = False
) -> dict[str, FusedParameter]:
    """Returns the parameters saved under other names by a module of ``config``."""
    model = _build(config, trust_remote_code)
    shapes = {name: value.shape for name, value in _tensors(model).items()}
    return {
        name: FusedParameter(
            shape=shapes[name],
            parts=tuple(
                TensorPart(
                    name=part_name,
                    shape=part.shape,
                    stride=tuple(part.stride()),
                    offset=int(part.storage_offset()),
                )
                for part_name, part in saved.items()
            ),
        )
        for name, saved in _saved(model).items()
        if name in shapes and list(saved) != [name]
    }


def _build(config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise ConfigurationError(
            f"transformers has no causal language model for a configuration of type "
            f"{type(config).__name__}, so the parameters of the served model cannot be "
            f"listed: {error}"
        ) from error


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns the parameters, each once, and the persistent buffers."""
    tied = dict(model.named_parameters(remove_duplicate=False)).keys()
    saved = model.state_dict(keep_vars=True).items()
    buffers = {name: value for name, value in saved if name not in tied}
    return {**dict(model.named_parameters()), **buffers}


def _saved(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns name in the module -> name in a checkpoint -> tensor, all on meta.

    A checkpoint's tensor is a view of the module's, with its position in it. A tensor
    of several parameters is a copy, and has a name of its own. Some versions of
    transformers make each part contiguous, which would copy it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    held = {name: value.detach() for name, value in _tensors(model).items()}
    owners = {value.untyped_storage()._cdata: name for name, value in held.items()}
    by_owner: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
    with _Views():
        converted = revert_weight_conversion(model, dict(held))
    for name, value in converted.items():
        owner = owners.get(value.untyped_storage()._cdata, name)
        by_owner.setdefault(owner, {})[name] = value
    return {name: saved for name, saved in by_owner.items() if saved}


class _Views(TorchFunctionMode):
    """Leaves a view as it is where it would be copied to be contiguous."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def write_mark(folder: Path, model: str) -> None:
    """Marks a folder with the original model of its weights."""
    (folder / MARK).write_text(json.dumps({"model": model}))


def original_model(path: str) -> str:
    """Returns the original model of a checkpoint; ``path`` if it has no mark."""
    try:
        return str(json.loads((Path(path) / MARK).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about a served model, read from its files."""

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Tokens at the end of a response."""
    quantization: Mapping[str, Any]
    """``quantization_config`` of the checkpoint; empty: not quantized."""
    experts: ExpertShape | None = None
    """Sizes of a mixture of experts; ``None`` for other models."""


def read_model(
    model: str | None,
    reported: str,
    started: str,
    trust_remote_code: bool,
    revision: str | None,
) -> ModelFacts:
    """Returns the facts about a server's model from its files."""
    # The folder of a disk update may be gone; its mark names the original model.
    served = original_model(reported)
    started = started or served
    if model is None:
        check_unambiguous(served)
        check_unambiguous(started)
    # A revision belongs to the server's original model name.
    revision = None if model else revision
    try:
        config = load_model_config(model or served, trust_remote_code, revision)
    except ConfigurationError:
        if model or started == served:
            raise
        served = started
        config = load_model_config(started, trust_remote_code, revision)
    vocab_size = int(config.get_text_config().vocab_size)
    quantized = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantized, Mapping):
        quantized = vars(quantized)
    return ModelFacts(
        path=served,
        vocab_size=vocab_size,
        eos_token_ids=find_eos_token_ids(config, model or served, revision),
        quantization=quantized,
        experts=find_experts(config),
    )


def find_experts(config: Any) -> ExpertShape | None:
    """Returns the sizes of a mixture of experts; ``None`` for other models.

    The rows of a server match SGLang's ``RoutedExpertsCapturer``.
    """
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None)
    if not chosen:
        return None
    counts = (getattr(text, name, None) for name in _EXPERT_COUNTS)
    return ExpertShape(
        num_layers=int(text.num_hidden_layers),
        num_chosen=int(chosen),
        num_experts=next((n for n in counts if isinstance(n, int)), None),
    )


def check_unambiguous(reported: str) -> None:
    """Refuses a model whose reported name is also a folder of this process.

    Such a name is a hub name, or a path in the server's own folder, which is unknown:
    the folder here can contain another model.
    """
    local = Path(reported)
    if reported and not local.is_absolute() and local.is_dir():
        folder = str(local.absolute())
        raise ConfigurationError(
            f"The server was started with {reported!r}, which is a hub name or a path "
            f"in the server's own folder. Here it is the folder {folder!r}, which can "
            f"hold another model. If it is the served one, pass model={folder!r}; or "
            f"start the server with an absolute path."
        )


class ModelReader:
    """Reads models, each once for concurrent requests."""

    def __init__(self) -> None:
        self._reading: dict[tuple[object, ...], asyncio.Task[Any]] = {}

    async def read(self, *place: Any) -> ModelFacts:
        """Returns the result of :func:`read_model`."""
        if place not in self._reading:
            # In a thread: a model's files can be on slow storage.
            work = asyncio.to_thread(read_model, *place)
            self._reading[place] = asyncio.ensure_future(work)
        facts: ModelFacts = await asyncio.shield(self._reading[place])
        return facts


def load_model_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Returns the Hugging Face configuration of a folder or a hub name."""
    # Models are read in several threads, and transformers' lazily loaded modules fail
    # in a thread while another thread loads them.
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
    subject: str, error: Exception, trust_remote_code: bool, advice: str
) -> ConfigurationError:
    """Returns the error for files that transformers cannot read here."""
    reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); {advice}"
    if not trust_remote_code and "trust_remote_code" in str(error):
        reason = (
            "without running the code that comes with it. If you trust that code, give "
            "from_pretrained or connect trust_remote_code=True."
        )
    return ConfigurationError(f"{subject} cannot be read from here {reason}")


def find_eos_token_ids(
    config: Any, model: str, revision: str | None = None
) -> tuple[int, ...]:
    """Returns the end tokens of a response, from both files, as a server does."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(
            model, revision=revision or "main"
        ).eos_token_id
    except OSError:  # Most models have this optional file.
        generation = None
    eos_ids: set[int] = set()
    for ids in (config.get_text_config().eos_token_id, generation):
        eos_ids.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(eos_ids))

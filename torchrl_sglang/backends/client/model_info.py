"""Names, types and shapes of a served model's parameters, from its configuration.

SGLang has no route that lists them. Its weight loaders take the names of a checkpoint,
so the Hugging Face model is built without memory (on the meta device) and asked what
it would save. That can differ from what the module holds: transformers fuses the
experts of a layer when it loads them. A loader drops a fused name without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchrl_sglang.backends.client.capabilities import (
    load_model_config,
    why_untrusted,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import (
    FusedParameter,
    ModelMetadata,
    ServerCapabilities,
    TensorPart,
)

__all__ = ["ServedModel", "fused_from_config", "metadata_from_config"]


class ServedModel:
    """Reads the files of the served model on this machine.

    ``path`` is a folder or hub name with them, where the server's own cannot be read.
    """

    def __init__(
        self,
        capabilities: ServerCapabilities,
        path: str | None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.path = path or capabilities.model_path
        self._dtype = capabilities.dtype
        self._tokenizer_path = path or capabilities.tokenizer_path
        self._trusted = trust_remote_code
        # It belongs to the name that the server was started with.
        self._revision = None if path else capabilities.server_args.get("revision")
        self._tokenizer: Any = None

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer, loaded at the first call."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            path = self._tokenizer_path
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    path,
                    trust_remote_code=self._trusted,
                    revision=self._revision or "main",
                )
            except Exception as error:
                advice = why_untrusted(error, self._trusted) or (
                    f"({type(error).__name__}: {error}); pass a tokenizer, or "
                    f"connect(..., model=...) with a folder that holds it."
                )
                raise ConfigurationError(
                    f"The tokenizer {path!r} cannot be read from here {advice}"
                ) from error
        return self._tokenizer

    def get_metadata(self) -> ModelMetadata:
        """Returns (dtype, shape) of every parameter under its checkpoint's name."""
        return metadata_from_config(
            load_model_config(self.path, self._trusted, self._revision),
            self._dtype,
            trust_remote_code=self._trusted,
        )

    def get_fused_parameters(self) -> dict[str, FusedParameter]:
        """Returns the parameters that a module and a checkpoint hold differently."""
        config = load_model_config(self.path, self._trusted, self._revision)
        return fused_from_config(config, trust_remote_code=self._trusted)


def metadata_from_config(
    config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False
) -> ModelMetadata:
    """Returns (dtype, shape) of every parameter of the model that ``config`` describes.

    Tied weights appear once, under the name that Hugging Face saves them with;
    ``dtype`` is by default the configuration's.
    """
    model = _build(config, trust_remote_code)
    served = dtype or getattr(config, "dtype", None) or torch.float32
    buffers = dict(_persistent_buffers(model))
    found: ModelMetadata = {}
    for name, saved in _saved(model).items():
        for part_name, part in saved.items():
            # What is no parameter is kept as exact as it was trained.
            exact = buffers[name].dtype if name in buffers else served
            found[part_name] = (exact, part.shape)
    return found


def fused_from_config(
    config: Any, *, trust_remote_code: bool = False
) -> dict[str, FusedParameter]:
    """Returns the parameters that a module of ``config`` saves under other names."""
    model = _build(config, trust_remote_code)
    shapes = {name: value.shape for name, value in _tensors(model)}
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


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from _persistent_buffers(model)


def _persistent_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), value


def _saved(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns name in the module -> name in a checkpoint -> tensor, all on meta.

    What a checkpoint holds is a view of what the module holds, and a view on the meta
    device tells where it lies. What is put together from several parameters is no view
    of any; it is listed under its own name. Some versions of transformers make each
    part contiguous, which would copy it, and values on the meta device need no copy.
    """
    from transformers.core_model_loading import revert_weight_conversion

    held = {name: value.detach() for name, value in _tensors(model)}
    owners = {value.untyped_storage()._cdata: name for name, value in held.items()}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
    with _Views():
        converted = revert_weight_conversion(model, dict(held))
    for name, value in converted.items():
        owner = owners.get(value.untyped_storage()._cdata, name)
        found.setdefault(owner, {})[name] = value
    return {name: saved for name, saved in found.items() if saved}


class _Views(TorchFunctionMode):
    """Leaves a view as it is where it would be copied to be contiguous."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))

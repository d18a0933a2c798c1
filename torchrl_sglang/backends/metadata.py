"""Names, types and shapes of a served model's parameters, from its configuration.

SGLang has no route that lists them. Its weight loaders take Hugging Face's names, so
the Hugging Face model is built without memory (on the meta device) and asked.
"""

from __future__ import annotations

from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ModelMetadata

__all__ = ["metadata_from_config"]


def metadata_from_config(config: Any, dtype: torch.dtype | None) -> ModelMetadata:
    """Returns the parameters of the model that ``config`` describes.

    Tied weights appear once, under the name that Hugging Face saves them with.

    Args:
        config: a Hugging Face configuration.
        dtype: type of the served weights; by default the configuration's.

    Raises:
        ConfigurationError: if transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigurationError(
            f"transformers has no causal language model for a configuration of type "
            f"{type(config).__name__}, so the parameters of the served model cannot be "
            f"listed: {error}"
        ) from error
    served = dtype or getattr(config, "dtype", None) or torch.float32
    return {
        name: (served, parameter.shape) for name, parameter in model.named_parameters()
    }

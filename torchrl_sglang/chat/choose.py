"""``choose_template``: the chat template of a model."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_sglang.errors import ConfigurationError


def choose_template(
    tokenizer: Any,
    *,
    template: str | None = None,
    name: str | None = None,
    by_model: bool = False,
) -> str:
    """Returns the chat template of a model.

    Args:
        tokenizer: the model's.
        template: an explicit template.
        name: name of a template of TorchRL.
        by_model: select TorchRL's template by the model's name, for the same prompt in
            trainer and engine. For other models, and without ``by_model``, it is the
            tokenizer's own; TorchRL would fall back to ChatML.
    """
    if template is not None:
        return check_template(template)
    if name is not None or by_model:
        chosen = _of_torchrl(tokenizer, name)
        if chosen is not None:
            return chosen
    try:
        # Read by its method, as a tokenizer can have several templates, or none.
        text: str = tokenizer.get_chat_template()
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The tokenizer {_path(tokenizer)!r} has no chat template. Pass "
            f"chat_template=...; or, to SGLangWrapper, the name of one of TorchRL's, "
            f"such as chat_template_name='chatml_format', or input_mode='text'."
        ) from error
    return text


def check_template(template: Any) -> str:
    """Checks and returns a template; it must render messages."""
    if not isinstance(template, str) or "{" not in template:
        raise ConfigurationError(
            f"chat_template={template!r} is no template, which has {{{{ ... }}}} or "
            f"{{% ... %}} in it; give the text of a file, Path(...).read_text()."
        )
    try:
        # It is compiled, for no conversation.
        render_jinja_template(conversations=[], chat_template=template)
    # SyntaxError: a tag in the wrong place, such as a {% break %}.
    except (TemplateSyntaxError, SyntaxError) as error:
        raise ConfigurationError(
            f"chat_template is not one of Jinja's: {error} (line {error.lineno})."
        ) from error
    return template


def _path(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", ""))


class _TemplateProbe:
    """Passed to TorchRL as a tokenizer to record the chosen template."""

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.name_or_path = _path(tokenizer)
        self.chosen: str | None = None

    def apply_chat_template(self, *, chat_template: str, **kwargs: Any) -> str:
        self.chosen = chat_template
        return ""


def _of_torchrl(tokenizer: Any, name: str | None) -> str | None:
    """Returns TorchRL's template ``name``, or its template for this model, if any."""
    # TorchRL's templates depend on TensorDict, which this package avoids.
    from torchrl.data.llm import History
    from torchrl.data.llm.history import _CHAT_TEMPLATES

    if name is not None and name not in _CHAT_TEMPLATES:
        raise ConfigurationError(
            f"chat_template_name={name!r} must be one of TorchRL's templates: "
            f"{', '.join(sorted(_CHAT_TEMPLATES))}."
        )
    probe = _TemplateProbe(tokenizer)
    message = History(role="user", content="", batch_size=()).unsqueeze(0)
    message.apply_chat_template(tokenizer=probe, chat_template_name=name)
    fell_back = name is None and probe.chosen is _CHAT_TEMPLATES["chatml_format"]
    return None if fell_back else probe.chosen

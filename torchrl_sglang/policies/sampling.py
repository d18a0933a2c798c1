"""Translates sampling parameters of TorchRL, vLLM and SGLang for the engine. Pure.

Each one is mapped or refused by name; none is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.requests.sampling import (
    GREEDY_TEMPERATURE,
    SAMPLING_ALIASES,
    SAMPLING_PARAMETERS,
    hint,
)
from torchrl_sglang.requests.seeds import with_sample_seed
from torchrl_sglang.support.checks import check_count, check_flag, to_python

DEFAULT_MAX_TOKENS = 16
"""Default response length, the same as vLLM's."""

_VLLM_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), 0.0),
    **dict.fromkeys(("repetition_penalty", "temperature", "top_p"), 1.0),
    **dict.fromkeys(("max_tokens", "seed")),
    **dict.fromkeys(("stop", "stop_token_ids"), ()),
    "ignore_eos": False,
    "min_tokens": 0,
    "top_k": -1,
}
"""Parameters of vLLM's class, under vLLM's names, and their defaults."""


def as_texts(stop: str | Sequence[str]) -> list[str]:
    """Returns one or several stop strings as a list."""
    return [stop] if isinstance(stop, str) else list(stop)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a :class:`~torchrl_sglang.SGLangWrapper`.

    The parameters of vLLM's class can be read as attributes under vLLM's names
    (``max_tokens``, ``top_p``, ``stop``, ...), with vLLM's defaults.
    """

    n: int = 1
    """Samples per prompt."""
    prompt_logprobs: bool = False
    """Return the prompt's log-probs."""
    top_logprobs: int = 0
    """Return the top-k tokens at each position of the response, for this k."""
    include_stop_str_in_output: bool = True
    """Keep the stop string that ends a response."""
    skip_special_tokens: bool = False
    """Remove special tokens from the response's text."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for the engine, under SGLang's names."""
    replaced: Mapping[str, Any] | None = None
    """Temperature in whose place ``do_sample=False`` put 0, which ``do_sample=True`` of
    a call puts back; ``None`` without ``do_sample=False``."""

    def __getattr__(self, name: str) -> Any:
        if name not in _VLLM_DEFAULTS:
            raise AttributeError(f"SamplingParams has no attribute {name!r}.")
        default = _VLLM_DEFAULTS[name]
        value = self.engine.get(SAMPLING_ALIASES.get(name, name), default)
        if name == "stop":
            return as_texts(value)
        if name == "stop_token_ids":
            return sorted(value)
        return value if default is None else type(default)(value)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Parameters for the engine without the effect of ``do_sample=False``."""
        if self.replaced is None:
            return self.engine
        params = {k: v for k, v in self.engine.items() if k != "temperature"}
        return {**params, **self.replaced}

    def for_sample(self, index: int) -> Mapping[str, Any]:
        """Returns the engine's parameters of one sample; each gets a different seed."""
        return with_sample_seed(self.engine, index)


_FLAGS = {
    "include_stop_str_in_output": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
}
"""Name of a bool -> field of :class:`SamplingParams`."""

_OUTPUT_OPTIONS = ("logprobs", "num_return_sequences", "prompt_logprobs", *_FLAGS)
"""Names that select outputs and do not affect sampling."""

_GUIDES = ("guided_decoding", "structured_outputs")
"""vLLM's names for a grammar: an object or a mapping with one field set."""

_UNSUPPORTED = {
    # name: (accepted values, which have no effect; why others are refused)
    "num_beams": ((1, None), "SGLang samples; it has no beam search here"),
    "length_penalty": ((1.0, None), "it belongs to beam search, which SGLang lacks"),
    "early_stopping": ((False, None), "it belongs to beam search, which SGLang lacks"),
    "best_of": ((1, None), "sample with num_samples and choose by reward instead"),
    "use_beam_search": ((False, None), "SGLang samples; it has no beam search here"),
    "bad_words": (([], None), "give logit_bias={token_id: -1e9} instead"),
    "allowed_token_ids": ((None,), "give regex=... to constrain the output"),
    "logits_processors": (([], None), "it is code, which is not sent to a server"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt before the wrapper"),
    "spaces_between_special_tokens": ((True, None), "the text is the exact decode"),
    "detokenize": ((True, False, None), ""),
    "do_sample": ((True, False, None), ""),
    "flat_logprobs": ((True, False, None), ""),
    "output_kind": ((None,), "responses are returned when they are finished"),
    "skip_reading_prefix_cache": ((False, None), "call engine.flush_cache()"),
    "extra_args": ((None, {}), "give SGLang's sampling parameters by name"),
}
"""Parameters that SGLang does not have."""


def _json_schema(value: Any) -> str:
    """Returns the text of a JSON schema; of a pydantic class, its own."""
    if isinstance(value, str):
        return value
    make = getattr(value, "model_json_schema", None)
    schema = make() if isinstance(value, type) and callable(make) else value
    with suppress(TypeError, ValueError):
        if isinstance(schema, Mapping):
            return json.dumps(to_python(dict(schema)))
    raise ConfigurationError(
        f"A JSON schema must be a text, a mapping or a pydantic class, got {value!r}, "
        f"a {type(value).__name__}; give what json.dumps can write."
    )


def _alternatives(choices: Any) -> str:
    """Returns the regular expression that matches exactly these texts."""
    is_list = isinstance(choices, Iterable) and not isinstance(choices, (str, bytes))
    texts = list(choices) if is_list else []
    if not texts or not all(isinstance(text, (str, int, float)) for text in texts):
        raise ConfigurationError(
            f"A choice must be a list of texts with at least one in it, such as "
            f"['yes', 'no'], got {choices!r}."
        )
    return "(" + "|".join(re.escape(str(text)) for text in texts) + ")"


_CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "guided_json": ("json_schema", _json_schema),
    "json_schema": ("json_schema", _json_schema),
    "json": ("json_schema", _json_schema),
    "guided_choice": ("regex", _alternatives),
    "choice": ("regex", _alternatives),
}
"""Name -> SGLang's name and the conversion of its value."""

_KNOWN = (*SAMPLING_ALIASES, *_CONVERTED, *_UNSUPPORTED, *_OUTPUT_OPTIONS, *_GUIDES)
"""All names beyond SGLang's own."""

_NUMBER_OF_SAMPLES = ("num_generations", "num_samples", "group_size")
"""Names of ``num_return_sequences`` in other libraries and arguments."""

_CHECKED_BY_TORCHRL = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Numbers that TorchRL compares with their limits."""


def check_numbers(generate_kwargs: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigurationError` for non-numbers that TorchRL would compare."""
    for name in _CHECKED_BY_TORCHRL:
        value = to_python(generate_kwargs.get(name))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not number:
            raise ConfigurationError(f"{name} must be a number, got {value!r}.")


def translate(
    standard: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Translates parameters that TorchRL has standardised, over the defaults.

    TorchRL has renamed ``max_tokens`` to ``max_new_tokens`` and ``n`` to
    ``num_return_sequences``.
    """
    base = defaults or SamplingParams(engine={"max_new_tokens": DEFAULT_MAX_TOKENS})
    standard = to_python(dict(standard))
    do_sample = standard.get("do_sample")
    engine = dict(base.sampling if do_sample is True else base.engine)
    argument_of: dict[str, str] = {}
    for name, value in _unfold(standard).items():
        if name in _UNSUPPORTED:
            accepted, reason = _UNSUPPORTED[name]
            if value not in accepted:
                raise ConfigurationError(
                    f"The generation argument {name}={value!r} is not supported: "
                    f"{reason}."
                )
            continue
        if name in _OUTPUT_OPTIONS:
            continue
        target, convert = _CONVERTED.get(name, (SAMPLING_ALIASES.get(name, name), None))
        if target not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name!r} is not a generation argument of SGLangWrapper.{_hint(name)}"
            )
        if value is None and name != "max_new_tokens":
            continue
        if target in argument_of:
            raise ConfigurationError(
                f"{argument_of[target]!r} and {name!r} both set {target!r}; give one."
            )
        argument_of[target] = name
        engine[target] = convert(value) if convert is not None else value
    replaced = None if "temperature" in argument_of else base.replaced
    replaced = _choose_sampling(engine, replaced, do_sample)
    if engine.get("max_new_tokens") == 0:
        raise ConfigurationError(
            "max_new_tokens=0 generates nothing; give at least 1, or score the prompt "
            "with generate=False."
        )
    options = _output_options(standard)
    return replace(base, engine=engine, replaced=replaced, **options)


def _choose_sampling(
    engine: dict[str, Any], replaced: Mapping[str, Any] | None, do_sample: bool | None
) -> Mapping[str, Any] | None:
    """Sets the temperature of ``do_sample``; returns the replaced parameters.

    Refuses a temperature with which ``do_sample=True`` would draw nothing.
    """
    temperature = engine.get("temperature")
    if do_sample is None:
        return replaced
    if not do_sample:
        engine["temperature"] = 0.0
        old_temperature = {} if temperature is None else {"temperature": temperature}
        return old_temperature if replaced is None else replaced
    if isinstance(temperature, (int, float)) and temperature < GREEDY_TEMPERATURE:
        raise ConfigurationError(
            f"do_sample=True and temperature={temperature!r}, which draws nothing, are "
            f"both given; give another temperature, or do_sample=False."
        )
    return None


def _hint(name: str) -> str:
    """Returns the end of a message about an unknown name: the nearest valid one."""
    if name in _NUMBER_OF_SAMPLES:
        return (
            " The samples of each prompt are SGLangWrapper(num_samples=...), or "
            "group_size=... of a collector."
        )
    return hint(name, _KNOWN)


def _unfold(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces vLLM's grammar objects by their fields."""
    unfolded: dict[str, Any] = {}
    for name, value in standard.items():
        if name not in _GUIDES:
            unfolded[name] = value
        elif value is not None:
            fields = value if isinstance(value, Mapping) else vars(value)
            # Bools of vLLM's objects select its own grammar backends.
            unfolded |= {
                field: chosen
                for field, chosen in fields.items()
                if chosen is not None and not isinstance(chosen, bool)
            }
    return unfolded


def _output_options(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given fields of :class:`SamplingParams` that select outputs."""
    fields: dict[str, Any] = {}
    for name, field_name in _FLAGS.items():
        value = standard.get(name)
        if value is None:
            continue
        value = check_flag(name, value)
        if fields.setdefault(field_name, value) != value:
            raise ConfigurationError(
                f"{name!r} is given twice, and not the same; give one."
            )
    n, top = standard.get("num_return_sequences"), standard.get("logprobs")
    if n is not None:
        fields["n"] = check_count("num_return_sequences", n)
    if top is not None:
        # True means the sampled token's log-prob; return_log_probs controls that.
        top = 0 if isinstance(top, bool) else top
        fields["top_logprobs"] = check_count("logprobs", top, least=0)
    prompt = standard.get("prompt_logprobs")
    if prompt is not None:
        if prompt not in (False, True, 0, 1):
            raise ConfigurationError(
                f"prompt_logprobs={prompt!r} is not supported: prompts have no top-k "
                f"log-probs; give True."
            )
        fields["prompt_logprobs"] = bool(prompt)
    return fields

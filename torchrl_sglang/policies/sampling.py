"""Generation arguments to what the engine takes: pure.

TorchRL's standard names, vLLM's names and SGLang's own all arrive here. Each one is
mapped, or refused by name: nothing is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_sglang.backends.generation.sampling import (
    SAMPLING_ALIASES,
    SAMPLING_PARAMETERS,
    hint,
)
from torchrl_sglang.backends.support.checks import check_count, check_flag, to_python
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.stopping import as_texts

__all__ = ["SamplingParams", "check_numbers", "translate"]

DEFAULT_MAX_TOKENS = 16
"""Response length when none is given; vLLM's default, so pipelines behave alike."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample: what :class:`~torchrl_sglang.SGLangWrapper` asks of the engine.

    What vLLM's class has can be read under vLLM's names: ``max_tokens``, ``top_p``,
    ``top_k``, ``stop`` and so on, with vLLM's defaults.
    """

    n: int = 1
    """Number of samples of each prompt."""
    prompt_logprobs: bool = False
    """Whether the prompt's log-probabilities are asked for too."""
    top_logprobs: int = 0
    """Number of the likeliest tokens to name in each response token's place."""
    include_stop_str_in_output: bool = True
    """Whether a response keeps the stop string that it ends with."""
    skip_special_tokens: bool = False
    """Whether special tokens are left out of the response's text."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for the engine, under SGLang's names."""

    @property
    def top_p(self) -> float:
        """Share of the probability that is sampled from; 1 for all of it."""
        return float(self.engine.get("top_p", 1.0))

    @property
    def top_k(self) -> int:
        """Number of the likeliest tokens that are sampled from; -1 for no limit."""
        return int(self.engine.get("top_k", -1))

    @property
    def min_p(self) -> float:
        """Least probability of a token over that of the likeliest; 0 for no limit."""
        return float(self.engine.get("min_p", 0.0))

    @property
    def repetition_penalty(self) -> float:
        """Divides the logits of tokens that are there already; 1 for no penalty."""
        return float(self.engine.get("repetition_penalty", 1.0))

    @property
    def presence_penalty(self) -> float:
        """Taken from the logits of tokens that were generated; 0 for no penalty."""
        return float(self.engine.get("presence_penalty", 0.0))

    @property
    def frequency_penalty(self) -> float:
        """The same for each time that a token was generated; 0 for no penalty."""
        return float(self.engine.get("frequency_penalty", 0.0))

    @property
    def stop(self) -> list[str]:
        """Texts that end a response."""
        return as_texts(self.engine.get("stop", ()))

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a response, beside the model's own."""
        return sorted(self.engine.get("stop_token_ids", ()))

    @property
    def ignore_eos(self) -> bool:
        """Whether a response goes on behind the model's own end."""
        return bool(self.engine.get("ignore_eos", False))

    @property
    def min_tokens(self) -> int:
        """Fewest tokens of a response."""
        return int(self.engine.get("min_new_tokens", 0))

    @property
    def seed(self) -> int | None:
        """Seed of the first sample of a prompt, if one was given."""
        seed: int | None = self.engine.get("sampling_seed")
        return seed

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a response; ``None`` for what the context leaves room for."""
        limit: int | None = self.engine.get("max_new_tokens")
        return limit

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""
        return float(self.engine.get("temperature", 1.0))

    def for_sample(self, index: int) -> Mapping[str, Any]:
        """Returns the engine's parameters for the ``index``-th sample of a prompt.

        Samples of one prompt must differ, so a seed moves with the sample: it is the
        given one plus ``index``, beginning again where 64 bits end.
        """
        seed = self.engine.get("sampling_seed")
        if seed is None or index == 0:
            return self.engine
        return {**self.engine, "sampling_seed": (seed + index + 2**63) % 2**64 - 2**63}


_SAME_FIELD = {
    "include_stop_str_in_output": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
}
"""A name for a choice about the output -> the field of :class:`SamplingParams`."""

_ABOUT_THE_CALL = (
    "logprobs",
    "num_return_sequences",
    "prompt_logprobs",
    *_SAME_FIELD,
)
"""Names that decide what is returned, not how it is sampled."""

_GUIDES = ("guided_decoding", "structured_outputs")
"""vLLM's names for a constraint; an object or a mapping with one field set."""

_INERT = {
    # name: (values under which it changes nothing, why another value is refused)
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
"""Names that have no counterpart, with the values that ask for nothing special."""


def _json_schema(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _alternatives(choices: Any) -> str:
    """Returns the regular expression that matches exactly these texts."""
    given = isinstance(choices, Iterable) and not isinstance(choices, (str, bytes))
    texts = list(choices) if given else []
    if not texts or not all(isinstance(each, (str, int, float)) for each in texts):
        raise ConfigurationError(
            f"A choice must be a list of texts with at least one in it, such as "
            f"['yes', 'no'], got {choices!r}."
        )
    return "(" + "|".join(re.escape(str(each)) for each in texts) + ")"


_CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "guided_json": ("json_schema", _json_schema),
    "json_schema": ("json_schema", _json_schema),
    "json": ("json_schema", _json_schema),
    "guided_choice": ("regex", _alternatives),
    "choice": ("regex", _alternatives),
}
"""A name -> SGLang's name and how its value is converted."""


_KNOWN = (*SAMPLING_ALIASES, *_CONVERTED, *_INERT, *_ABOUT_THE_CALL, *_GUIDES)
"""Every name beyond SGLang's own."""


_CHECKED_BY_TORCHRL = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Numbers that TorchRL compares before it hands them on."""


def check_numbers(generate_kwargs: Mapping[str, Any]) -> None:
    """Checks that what TorchRL is going to compare are numbers.

    Raises:
        ConfigurationError: if one is not.
    """
    for name in _CHECKED_BY_TORCHRL:
        value = to_python(generate_kwargs.get(name))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not number:
            raise ConfigurationError(f"{name} must be a number, got {value!r}.")


def translate(
    standard: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Returns what to ask of the engine.

    Args:
        standard: generation arguments after TorchRL's own standardisation, in which
            ``max_tokens`` has become ``max_new_tokens`` and ``n``
            ``num_return_sequences``.
        defaults: what holds where ``standard`` says nothing.

    Raises:
        ConfigurationError: for a name that nothing knows, or a value that cannot be
            honoured; the message says what to do instead.

    Examples:
        >>> plan = translate({"max_new_tokens": 8, "stop_sequences": ["."], "seed": 1})
        >>> plan.engine["stop"], plan.engine["sampling_seed"], plan.max_tokens
        (['.'], 1, 8)
    """
    base = defaults or SamplingParams(engine={"max_new_tokens": DEFAULT_MAX_TOKENS})
    engine = dict(base.engine)
    given: dict[str, str] = {}
    for name, value in _unfold(standard).items():
        if name in _INERT:
            _check_inert(name, value)
            continue
        if name in _ABOUT_THE_CALL:
            continue
        target, convert = _CONVERTED.get(name, (SAMPLING_ALIASES.get(name, name), None))
        if target not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name!r} is not a generation argument that SGLangWrapper knows."
                f"{hint(name, _KNOWN)}"
            )
        if value is None and name != "max_new_tokens":
            continue
        if target in given:
            raise ConfigurationError(
                f"{given[target]!r} and {name!r} both set {target!r}; give one."
            )
        given[target] = name
        engine[target] = convert(value) if convert is not None else value
    if standard.get("do_sample") is False:
        engine["temperature"] = 0.0
    if engine.get("max_new_tokens") == 0:
        raise ConfigurationError(
            "max_new_tokens=0 generates nothing; give at least 1, or score the prompt "
            "with generate=False."
        )
    return replace(base, engine=engine, **_about_the_call(standard))


def _unfold(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with vLLM's objects for a constraint taken apart."""
    unfolded: dict[str, Any] = {}
    for name, value in standard.items():
        if name not in _GUIDES or value is None:
            if name not in _GUIDES:
                unfolded[name] = value
            continue
        fields = value if isinstance(value, Mapping) else vars(value)
        unfolded.update(
            (field, chosen)
            for field, chosen in fields.items()
            # vLLM's objects also hold switches for its own grammar backends.
            if chosen is not None and not isinstance(chosen, bool)
        )
    return unfolded


def _about_the_call(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that decide what is returned, as far as they are given."""
    fields: dict[str, Any] = {}
    for name, field_name in _SAME_FIELD.items():
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
        # True asks for the sampled token's, which return_log_probs decides.
        top = 0 if isinstance(top, bool) else top
        fields["top_logprobs"] = check_count("logprobs", top, least=0)
    prompt = standard.get("prompt_logprobs")
    if prompt is not None:
        if prompt not in (False, True, 0, 1):
            raise ConfigurationError(
                f"prompt_logprobs={prompt!r} cannot be honoured: a prompt's tokens "
                f"come without alternatives; give True."
            )
        fields["prompt_logprobs"] = bool(prompt)
    return fields


def _check_inert(name: str, value: Any) -> None:
    harmless, reason = _INERT[name]
    if value not in harmless:
        raise ConfigurationError(
            f"The generation argument {name}={value!r} cannot be honoured: {reason}."
        )

"""Generation arguments to what the engine takes: pure.

TorchRL's standard names, vLLM's names and SGLang's own all arrive here. Each one is
mapped, or refused by name: nothing is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.backends.wire import SAMPLING_PARAMETERS, hint
from torchrl_sglang.errors import ConfigurationError

__all__ = ["SamplingParams", "translate"]

DEFAULT_MAX_TOKENS = 16
"""Response length when none is given; vLLM's default, so pipelines behave alike."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample: what :class:`~torchrl_sglang.SGLangWrapper` asks of the engine.

    ``max_tokens``, ``n`` and ``temperature`` can be read as on vLLM's class.
    """

    n: int = 1
    """Number of samples of each prompt."""
    prompt_logprobs: bool = False
    """Whether the prompt's log-probabilities are asked for too."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for the engine, under SGLang's names."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a response."""
        return int(self.engine.get("max_new_tokens", DEFAULT_MAX_TOKENS))

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""
        return float(self.engine.get("temperature", 1.0))

    def for_sample(self, index: int) -> Mapping[str, Any]:
        """Returns the engine's parameters for the ``index``-th sample of a prompt.

        Samples of one prompt must differ, so a seed moves with the sample.
        """
        seed = self.engine.get("sampling_seed")
        if seed is None or index == 0:
            return self.engine
        return {**self.engine, "sampling_seed": seed + index}


_RENAMED = {
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "include_stop_str_in_output": "no_stop_trim",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop_sequences": "stop",
}
"""A standard or vLLM name -> SGLang's name for the same value."""

_ABOUT_THE_CALL = ("num_return_sequences", "prompt_logprobs")
"""Names that decide what is asked for, not how it is sampled."""

_INERT = {
    # name: (values under which it changes nothing, why another value is refused)
    "num_beams": ((1, None), "SGLang samples; it has no beam search here"),
    "length_penalty": ((1.0, None), "it belongs to beam search, which SGLang lacks"),
    "early_stopping": ((False, None), "it belongs to beam search, which SGLang lacks"),
    "best_of": ((1, None), "sample with num_samples and choose by reward instead"),
    "bad_words": (([], None), "give logit_bias={token_id: -100} instead"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt before the wrapper"),
    "detokenize": ((True, False, None), ""),
    "logprobs": ((True, False, None, 0, 1), "only the sampled token's is returned"),
    "do_sample": ((True, False, None), ""),
}
"""Names that have no counterpart, with the values that ask for nothing special."""


def _json_schema(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _alternatives(choices: Any) -> str:
    """Returns the regular expression that matches exactly these texts."""
    return "(" + "|".join(re.escape(str(choice)) for choice in choices) + ")"


_CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "guided_json": ("json_schema", _json_schema),
    "json_schema": ("json_schema", _json_schema),
    "guided_choice": ("regex", _alternatives),
}
"""A name -> SGLang's name and how its value is converted."""


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
    base = defaults or SamplingParams()
    engine: dict[str, Any] = {
        "max_new_tokens": DEFAULT_MAX_TOKENS,
        # vLLMWrapper's defaults: the recorded text is the exact decode.
        "no_stop_trim": True,
        "skip_special_tokens": False,
        **base.engine,
    }
    given: dict[str, str] = {}
    for name, value in standard.items():
        if name in _INERT:
            _check_inert(name, value)
        elif name not in _ABOUT_THE_CALL and value is not None:
            target, convert = _CONVERTED.get(name, (_RENAMED.get(name, name), None))
            if target in given:
                raise ConfigurationError(
                    f"{given[target]!r} and {name!r} both set {target!r}; give one."
                )
            given[target] = name
            engine[target] = convert(value) if convert is not None else value
    for target, name in given.items():
        if target not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name!r} is not a generation argument that SGLangWrapper knows."
                f"{hint(name, [*_RENAMED, *_CONVERTED, *_INERT, *_ABOUT_THE_CALL])}"
            )
    if standard.get("do_sample") is False:
        engine["temperature"] = 0.0
    n = standard.get("num_return_sequences")
    n = base.n if n is None else n
    if not isinstance(n, int) or n < 1:
        raise ConfigurationError(
            f"num_return_sequences={n!r} is not a number of samples; give at least 1."
        )
    return SamplingParams(
        n=n,
        prompt_logprobs=bool(standard.get("prompt_logprobs", base.prompt_logprobs)),
        engine=engine,
    )


def _check_inert(name: str, value: Any) -> None:
    harmless, reason = _INERT[name]
    if value not in harmless:
        raise ConfigurationError(
            f"The generation argument {name}={value!r} cannot be honoured: {reason}."
        )

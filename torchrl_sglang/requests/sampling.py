"""THE table of sampling parameters, and the checks that read it. Pure.

To add a sampling parameter, add a row to :data:`SAMPLING_PARAMETERS`; everything else
(aliases, checks, routing, scoring of log-probs) is derived from it.

Source: ``sglang/srt/sampling/sampling_params.py``, whose limits these are; for servers
that draft tokens ``eagle_sample`` in ``sglang/srt/speculative/eagle_utils.py`` (SGLang
0.5.15 to 0.5.23), which verifies drafts and draws the token behind them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.support.checks import nearest, to_python
from torchrl_sglang.types import ServerCapabilities

LARGEST_BIAS = 3e38
"""A larger logit bias is infinite in float32."""

_BOOL = (bool,)
_INT = (int,)
_NUMBER = (int, float)
_IDS = (list, tuple, set, frozenset)
_TEXT = (str,)
_TEXTS = (str, list, tuple)


def check_token_ids(
    token_ids: Sequence[int], capabilities: ServerCapabilities, name: str
) -> None:
    """Raises :class:`ConfigurationError` unless all ids are in the vocabulary."""
    if not token_ids:
        return
    integers = set(map(type, token_ids)) == {int}
    if integers and min(token_ids) >= 0 and max(token_ids) < capabilities.vocab_size:
        return
    for token in token_ids:
        if type(token) is not int:
            raise ConfigurationError(
                f"{name} holds {token!r}, a {type(token).__name__}; token ids are "
                f"Python integers (tolist() turns a tensor or an array into them)."
            )
        if not 0 <= token < capabilities.vocab_size:
            raise ConfigurationError(
                f"{name} holds the token id {token}, which is outside the vocabulary "
                f"of {capabilities.model_path!r}: ids lie in "
                f"[0, {capabilities.vocab_size}). Is this the served model's tokenizer?"
            )


def _check_stop_ids(
    name: str, value: Any, capabilities: ServerCapabilities
) -> list[int]:
    stops = list(value)
    check_token_ids(stops, capabilities, name)
    return sorted(set(stops))


def _check_texts(name: str, value: Any, capabilities: ServerCapabilities) -> list[str]:
    """Returns ``stop`` or ``stop_regex`` as a list of texts that can match."""
    texts = [value] if isinstance(value, str) else list(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigurationError(
                f"{name} holds {text!r}; it takes texts that are not empty (an empty "
                f"one ends every response at its first token)."
            )
        if name == "stop_regex":
            try:
                re.compile(text)
            except re.error as error:
                raise ConfigurationError(
                    f"{name} holds {text!r}, which is not a regular expression: "
                    f"{error}."
                ) from None
    return texts


def _check_bias(
    name: str, bias: Mapping[Any, Any], capabilities: ServerCapabilities
) -> dict[str, float]:
    """Returns ``logit_bias`` with JSON's text keys and finite values."""
    checked: dict[str, float] = {}
    for token, value in bias.items():
        try:
            token_id = int(token)
        except (TypeError, ValueError):
            token_id = token
        check_token_ids([token_id], capabilities, name)
        if not isinstance(value, _NUMBER) or not abs(value) <= LARGEST_BIAS:
            raise ConfigurationError(
                f"{name} gives the token {token} the value {value!r}; it must be "
                f"a number in [{-LARGEST_BIAS:g}, {LARGEST_BIAS:g}] (give -1e9 to "
                f"forbid a token)."
            )
        checked[str(token_id)] = float(value)
    return checked


GREEDY_TEMPERATURE = 1e-6
"""Below it SGLang samples greedily, at temperature 1."""


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """One sampling parameter of SGLang."""

    types: tuple[type, ...]
    """Types of its values; ``bool`` does not count as a number."""
    _: KW_ONLY
    least: float = -math.inf
    """Smallest number."""
    greatest: float = math.inf
    """Largest number; never infinity itself."""
    excludes_least: bool = False
    """Numbers must be greater than ``least``."""
    aliases: tuple[str, ...] = ()
    """Names that TorchRL and vLLM have for the same value."""
    foreign: tuple[str, ...] = ()
    """Names that other libraries have for it. They are refused, and messages suggest
    this one: a name that looks alike can mean something else there."""
    neutral: tuple[Any, ...] = ()
    """Values beside ``None`` that leave the logits as they are, of a parameter that
    SGLang applies to the logits before it takes log-probs; empty for all others."""
    needs_grammar: bool = False
    """The server must have a grammar backend."""
    needs_tokenizer: bool = False
    """The server must have a tokenizer."""
    check: Callable[[str, Any, ServerCapabilities], Any] | None = None
    """Checks what ``types`` cannot say, and returns the value for JSON."""
    dropped_by_router: bool = False
    """sglang-router 0.3.2 silently removes it from requests."""
    counts_tokens: bool = False
    """SGLang counts the tokens so far for it, and forgets them in a retraction."""
    keeps_all: Callable[[Any, ServerCapabilities], bool] | None = None
    """Returns whether a value leaves no token out of what is drawn from, of a parameter
    that filters tokens; ``None`` for all others."""
    counts_here: bool = False
    """Another request can go on with the count, which is known here."""
    only_bars: bool = False
    """It bars tokens, and changes no logit of the others."""
    follows_drafts: bool = False
    """The filter is applied behind drafted tokens, too."""


_Row = SamplingParameter

SAMPLING_PARAMETERS: dict[str, SamplingParameter] = {
    "ebnf": _Row(
        _TEXT, aliases=("grammar", "guided_grammar"), neutral=("",), needs_grammar=True
    ),
    "frequency_penalty": _Row(
        _NUMBER, least=-2.0, greatest=2.0, neutral=(0,), counts_tokens=True
    ),
    "ignore_eos": _Row(_BOOL),
    "json_schema": _Row(_TEXT, neutral=("",), needs_grammar=True),
    "logit_bias": _Row(
        (dict,), neutral=({},), check=_check_bias, dropped_by_router=True
    ),
    "max_new_tokens": _Row(
        _INT,
        least=0,
        aliases=("max_tokens",),
        # OpenAI's, Anthropic's, TRL's, verl's and Hugging Face's.
        foreign=(
            *("max_completion_tokens", "max_output_tokens", "max_tokens_to_sample"),
            *("max_completion_length", "max_response_length", "response_length"),
            *("max_length", "max_gen_toks", "n_predict"),
        ),
    ),
    "min_new_tokens": _Row(
        _INT,
        least=0,
        aliases=("min_tokens",),
        foreign=("min_length", "min_completion_length", "min_completion_tokens"),
        neutral=(0,),
        counts_tokens=True,
        counts_here=True,
        only_bars=True,
    ),
    "min_p": _Row(_NUMBER, least=0.0, greatest=1.0, keeps_all=lambda p, _: p == 0),
    "no_stop_trim": _Row(_BOOL),
    "presence_penalty": _Row(
        _NUMBER, least=-2.0, greatest=2.0, neutral=(0,), counts_tokens=True
    ),
    "regex": _Row(_TEXT, aliases=("guided_regex",), neutral=("",), needs_grammar=True),
    "repetition_penalty": _Row(
        _NUMBER,
        least=0.0,
        greatest=2.0,
        excludes_least=True,
        neutral=(1,),
        counts_tokens=True,
    ),
    "sampling_seed": _Row(
        _INT,
        least=-(2**63),
        greatest=2**63 - 1,
        aliases=("seed",),
        foreign=("random_seed",),
    ),
    "skip_special_tokens": _Row(_BOOL),
    "spaces_between_special_tokens": _Row(_BOOL, dropped_by_router=True),
    "stop": _Row(
        _TEXTS,
        aliases=("stop_sequences",),
        foreign=("stop_strings", "stop_words", "stopping_criteria"),
        needs_tokenizer=True,
        check=_check_texts,
    ),
    "stop_regex": _Row(
        _TEXTS, needs_tokenizer=True, check=_check_texts, dropped_by_router=True
    ),
    "stop_token_ids": _Row(
        _IDS, foreign=("eos_token_id", "eos_token_ids"), check=_check_stop_ids
    ),
    "structural_tag": _Row(
        _TEXT, neutral=("",), needs_grammar=True, dropped_by_router=True
    ),
    "temperature": _Row(_NUMBER, least=0.0, foreign=("temp",)),
    # 2**30 is SGLang's own value for the whole vocabulary; 2**31 kills a server.
    "top_k": _Row(
        _INT,
        least=-1,
        greatest=2**30,
        keeps_all=lambda k, capabilities: not 1 <= k < capabilities.vocab_size,
        follows_drafts=True,
    ),
    "top_p": _Row(
        _NUMBER,
        least=0.0,
        greatest=1.0,
        excludes_least=True,
        keeps_all=lambda p, _: p == 1,
        follows_drafts=True,
    ),
}
"""SGLang's name -> parameter. Any other name is refused."""

SAMPLING_ALIASES = {
    alias: name for name, row in SAMPLING_PARAMETERS.items() for alias in row.aliases
}
"""TorchRL's or vLLM's name -> SGLang's name."""

_FOREIGN = {
    name: parameter
    for parameter, row in SAMPLING_PARAMETERS.items()
    for name in row.foreign
}
"""Another library's name -> SGLang's name."""


def effective_rows(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> dict[str, SamplingParameter]:
    """Returns the rows of parameters whose values, given or the server's, matter."""
    values = {**capabilities.default_sampling_params, **params}
    return {
        name: row
        for name, row in SAMPLING_PARAMETERS.items()
        if values.get(name) not in (None, *row.neutral)
    }


def filters_of(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns the values, given or the server's, that leave tokens out of sampling."""
    values = {**capabilities.default_sampling_params, **params}
    return {
        name: values[name]
        for name, row in SAMPLING_PARAMETERS.items()
        if row.keeps_all is not None
        and values.get(name) is not None
        and not row.keeps_all(values[name], capabilities)
    }


def temperature_of(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> float | None:
    """Returns the temperature that SGLang samples with; ``None`` if it is unknown."""
    value = params.get("temperature")
    if value is None:
        value = capabilities.default_sampling_params.get("temperature")
    if value is None:
        return 1.0
    return value if isinstance(value, _NUMBER) else None


def check_sampling_params(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns valid parameters under SGLang's names; ``None`` counts as not given."""
    checked = check_each(params, capabilities)
    _check_together(checked, capabilities)
    return checked


def check_values(params: Mapping[str, Any]) -> None:
    """Checks names and values of parameters, as far as no server is needed for it."""
    for name, raw in params.items():
        value = to_python(raw)
        row = SAMPLING_PARAMETERS[_resolve(name, value)]
        if value is not None:
            _check_value(name, value, row)
    _check_top_k(params)


def check_each(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """The same as :func:`check_sampling_params`, whatever the others' values are."""
    checked: dict[str, Any] = {}
    for given_name, raw in params.items():
        value = to_python(raw)
        name = _resolve(given_name, value)
        if value is None:
            continue
        if name in checked:
            raise ConfigurationError(
                f"The sampling parameter {name!r} is given twice, once as "
                f"{given_name!r}; give one."
            )
        row = SAMPLING_PARAMETERS[name]
        _check_value(given_name, value, row)
        if row.needs_grammar and not capabilities.has_grammar:
            raise UnsupportedByServerError(
                f"{given_name!r} needs a grammar backend, and the server was started "
                f"without one; start it with grammar_backend='xgrammar'."
            )
        if row.needs_tokenizer and not capabilities.has_tokenizer:
            raise UnsupportedByServerError(
                f"{given_name!r} is matched on text, and the server was started with "
                f"skip_tokenizer_init=True; give 'stop_token_ids'."
            )
        if row.check is not None:
            value = row.check(given_name, value, capabilities)
        checked[name] = value
    return checked


def _resolve(name: Any, value: Any) -> str:
    if name == "n":
        raise ConfigurationError(
            f"n={value!r} is not sent to the engine; repeat the prompt instead "
            f"(SGLangWrapper does so for num_samples)."
        )
    resolved: str = SAMPLING_ALIASES.get(name, name)
    if resolved not in SAMPLING_PARAMETERS:
        raise ConfigurationError(
            f"{name!r} is not a sampling parameter of SGLang.{hint(str(name))}"
        )
    return resolved


def _check_value(name: str, value: Any, row: SamplingParameter) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, row.types) or (is_bool and bool not in row.types):
        types = " or ".join(kind.__name__ for kind in row.types)
        raise ConfigurationError(
            f"The sampling parameter {name}={value!r} is a {type(value).__name__}; it "
            f"must be {types}."
        )
    if is_bool or not isinstance(value, _NUMBER):
        return
    above = value > row.least if row.excludes_least else value >= row.least
    if not (above and value <= row.greatest and value != math.inf):
        begin = "(" if row.excludes_least else "["
        end = ")" if row.greatest == math.inf else "]"
        raise ConfigurationError(
            f"The sampling parameter {name}={value!r} is out of range; it must lie in "
            f"{begin}{row.least:g}, {row.greatest:g}{end}."
        )


def _check_together(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> None:
    """Refuses values that contradict each other, or the servers' arguments."""
    minimum, maximum = params.get("min_new_tokens", 0), params.get("max_new_tokens")
    temperature = temperature_of(params, capabilities)
    # Greedy sampling draws nothing.
    honoured = capabilities.uses_seeds or temperature == 0
    if "sampling_seed" in params and not honoured:
        raise UnsupportedByServerError(
            f"sampling_seed={params['sampling_seed']!r} would be ignored: the server "
            f"was started without enable_deterministic_inference=True, or drafts "
            f"tokens. Start it with that and without speculative decoding, leave the "
            f"seed out, or sample with temperature=0."
        )
    # Greedy sampling draws nothing, and the first token follows no draft.
    if capabilities.speculates and temperature != 0 and maximum not in (0, 1):
        _check_speculation(params, temperature, capabilities)
    _check_top_k(params)
    if maximum is not None and minimum > maximum:
        raise ConfigurationError(
            f"min_new_tokens={minimum} is more than max_new_tokens={maximum}."
        )
    if params.get("ignore_eos") and params.get("stop_token_ids"):
        raise ConfigurationError(
            f"With ignore_eos=True SGLang ignores stop_token_ids="
            f"{list(params['stop_token_ids'])} as well; give only one of the two."
        )


def _check_speculation(
    params: Mapping[str, Any],
    temperature: float | None,
    capabilities: ServerCapabilities,
) -> None:
    """Refuses sampling that servers that draft tokens do differently."""
    for name, value in filters_of(params, capabilities).items():
        if SAMPLING_PARAMETERS[name].follows_drafts:
            continue
        raise UnsupportedByServerError(
            f"{name}={value!r} would be ignored: SGLang applies top_k and top_p alone "
            f"where it verifies drafts (speculative_algorithm). Leave it out, or start "
            f"the servers without speculative decoding."
        )
    args = capabilities.args
    for name in ("single", "acc"):
        threshold = getattr(args, f"speculative_accept_threshold_{name}")
        if threshold != 1:
            raise UnsupportedByServerError(
                f"temperature={temperature!r} would give other samples than the "
                f"model's: the servers accept drafts that it finds less likely "
                f"(speculative_accept_threshold_{name}={threshold!r}). Start them with "
                f"1.0, or sample with temperature=0."
            )
    if capabilities.biased_drafts:
        raise UnsupportedByServerError(
            f"temperature={temperature!r} would sample token 0 too often: SGLang's "
            f"n-gram drafts (speculative_algorithm='NGRAM') fill places that have no "
            f"draft with it. Start the servers without speculative decoding or with "
            f"another algorithm, or sample with temperature=0."
        )


def _check_top_k(params: Mapping[str, Any]) -> None:
    if params.get("top_k") == 0:
        raise ConfigurationError(
            "The sampling parameter top_k=0 keeps no token; give -1 for no limit, or "
            "at least 1."
        )


def hint(name: str, others: Sequence[str] = ()) -> str:
    """Returns the end of a message about an unknown name: the nearest valid one."""
    valid = sorted({*SAMPLING_PARAMETERS, *others})
    suggestion = _FOREIGN.get(name) or nearest(name, valid)
    if suggestion is not None:
        return f" Did you mean {suggestion!r}?"
    return f" The valid ones are {', '.join(valid)}."

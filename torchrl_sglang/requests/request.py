"""Requests of a caller: one frozen object for each prompt. Pure.

:func:`to_batch` turns the arguments of :meth:`.AsyncSGLang.generate` into requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, get_args

from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.requests.sampling import SAMPLING_ALIASES, SAMPLING_PARAMETERS, hint
from torchrl_sglang.requests.token_columns import TokenColumn, find_columns
from torchrl_sglang.support.checks import (
    check_flag,
    check_mapping,
    check_seconds,
    to_python,
)
from torchrl_sglang.support.texts import half_character
from torchrl_sglang.types import Completion, LogProbsMode

Outcome: TypeAlias = Completion | SGLangError
"""Result of a request."""

GENERATE_TIMEOUT_SECONDS = 1800.0
"""Default timeout of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to continue or to score.

    Examples:
        >>> request = GenerateRequest(
        ...     input_ids=[5, 6, 7],
        ...     sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        ...     return_logprobs=True,
        ... )
        >>> (completion,) = engine.generate_requests([request])
        >>> len(completion.log_probs)
        4
    """

    input_ids: Sequence[int]
    """Token ids of the prompt, at least one."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters under SGLang's, TorchRL's or vLLM's names."""
    return_logprobs: bool = False
    """Return the log-probability of each response token."""
    return_prompt_logprobs: bool = False
    """Return the log-probability of each prompt token."""
    top_logprobs: int = 0
    """Return the top-k tokens at each position of the response, for this k."""
    logprobs_mode: LogProbsMode = "model"
    """Distribution that the response's log-probabilities are taken from."""
    request_id: str | None = None
    """Name for :meth:`.AsyncSGLang.abort`."""
    session_id: str | None = None
    """Requests of one session go to one server, which has their prefix cached."""
    adapter: str | None = None
    """LoRA adapter; ``""`` for the base model, ``None`` for the engine's default."""
    priority: int | None = None
    """Of waiting requests, a server begins those with the greatest one first. Servers
    need ``enable_priority_scheduling=True``."""
    token_columns: Sequence[TokenColumn] = ()
    """Further quantities of each token; also given as names of ``TOKEN_COLUMNS``."""
    columns_from: int = 0
    """Set by the engine: first prompt token of which quantities that prompts have are
    asked for; those before it are known."""
    on_tokens: Callable[[list[int]], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called with all tokens of the response so far, every few tokens, in the thread of
    the engine's event loop; never where a server cannot tell. A response that has to
    begin anew may have other tokens the second time. What it raises ends the call."""

    def __post_init__(self) -> None:
        check_mapping("sampling_params", self.sampling_params)
        for name in ("return_logprobs", "return_prompt_logprobs"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        check_logprobs_mode(self.logprobs_mode)
        object.__setattr__(self, "token_columns", find_columns(self.token_columns))
        for name in ("request_id", "session_id"):
            _check_header(name, getattr(self, name))

    @property
    def wants_logprobs(self) -> bool:
        """Whether any log-probability of the response is asked for."""
        return self.return_logprobs or self.top_logprobs > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The requests of one call, and the options of the call."""

    requests: Sequence[GenerateRequest]
    """One per prompt."""
    timeout: float | None = None
    """Timeout of the batch, in seconds; ``None`` for 1800."""
    request_timeout: float | None = None
    """Timeout of each request from when it is sent, in seconds."""
    return_exceptions: bool = False
    """Return the error of a request in its place instead of raising the first one."""
    return_partial: bool = False
    """Return what an aborted request has generated instead of its error."""

    def __post_init__(self) -> None:
        for name in ("timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None:
                check_seconds(name, value)

    @property
    def seconds(self) -> float:
        """Timeout of the batch, in seconds."""
        return GENERATE_TIMEOUT_SECONDS if self.timeout is None else self.timeout


_CALL_OPTIONS = {option.name for option in fields(Batch)} - {"requests"}
VLLM_ARGUMENTS = {
    "prompt_token_ids": "give input_ids.",
    "lora_request": "give adapter='NAME', the name of engine.load_adapter().",
    "prompt_adapter_request": "SGLang has no prompt adapters; leave it out.",
    "guided_options_request": "give json_schema, regex or ebnf.",
    "use_tqdm": "no progress is shown; leave it out.",
    "timeout_seconds": "give timeout, in seconds.",
    "actor_index": "the engine chooses the server; leave it out, or give session_ids, "
    "which keep requests of a session on one server.",
}
"""Argument of ``generate`` of vLLM, or of TorchRL's ``AsyncVLLM`` -> what to do."""

_PER_PROMPT = {
    # argument of generate(), for all prompts or one for each: field of the request
    "return_logprobs": "return_logprobs",
    "return_prompt_logprobs": "return_prompt_logprobs",
    "top_logprobs": "top_logprobs",
    "request_ids": "request_id",
    "session_ids": "session_id",
    "adapter": "adapter",
    "priority": "priority",
}


def to_batch(
    prompts: str | Sequence[str] | None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    get_tokenizer: Callable[[], Any],
    *,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    logprobs_mode: LogProbsMode = "model",
    token_columns: Sequence[str | TokenColumn] = (),
    return_text: object = None,
    **options: Any,
) -> Batch:
    """Returns the requests of one call of :meth:`.AsyncSGLang.generate`."""
    # TorchRL's own engine takes return_text and ignores it.
    arguments = {
        "input_ids",
        "logprobs_mode",
        "token_columns",
        *_PER_PROMPT,
        *_CALL_OPTIONS,
    }
    sampling = {name: options[name] for name in options.keys() - arguments}
    for name in sampling.keys() - {"n", *SAMPLING_PARAMETERS, *SAMPLING_ALIASES}:
        if name in VLLM_ARGUMENTS:
            raise ConfigurationError(
                f"{name!r} of vLLM is no argument of generate(): {VLLM_ARGUMENTS[name]}"
            )
        raise ConfigurationError(
            f"{name!r} is neither an argument of generate() nor a sampling "
            f"parameter.{hint(name, sorted(arguments))}"
        )
    params = _merge(sampling_params, sampling)
    check_logprobs_mode(logprobs_mode)
    columns_of_tokens = find_columns(token_columns)
    token_ids = _to_token_ids(prompts, input_ids, get_tokenizer)
    size = len(token_ids)
    columns = {"sampling_params": _for_each(params, size, "sampling_params")}
    for name in options.keys() & _PER_PROMPT.keys():
        columns[_PER_PROMPT[name]] = _for_each(options[name], size, name)
    requests = [
        GenerateRequest(
            input_ids=ids,
            logprobs_mode=logprobs_mode,
            token_columns=columns_of_tokens,
            **{name: column[index] for name, column in columns.items()},
        )
        for index, ids in enumerate(token_ids)
    ]
    call = {name: options[name] for name in options.keys() & _CALL_OPTIONS}
    return Batch(requests=requests, **call)


def _to_token_ids(
    prompts: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    get_tokenizer: Callable[[], Any],
) -> list[Sequence[int]]:
    if prompts is None and input_ids is None:
        raise ConfigurationError("Must provide either prompts or input_ids.")
    if prompts is not None and input_ids is not None:
        raise ConfigurationError(
            "Cannot provide both prompts and input_ids; give one of them."
        )
    if prompts is not None:
        single = isinstance(prompts, (str, Mapping))
        return _read_prompts([prompts] if single else list(prompts), get_tokenizer)
    ids: Any = _to_list(input_ids)
    if not isinstance(ids, (list, tuple)):
        raise ConfigurationError(
            f"input_ids is a {type(input_ids).__name__}; give the token ids of one "
            f"prompt as a list of integers, or a list of such lists."
        )
    ids = to_python(ids)
    if ids and isinstance(ids[0], int):
        return [ids]
    return [to_python(_to_list(prompt)) for prompt in ids]


def _read_prompts(
    prompts: Sequence[Any], get_tokenizer: Callable[[], Any]
) -> list[Any]:
    """Returns the token ids of texts, and of vLLM's mappings with one or with ids."""
    read = [_read_prompt(index, prompt) for index, prompt in enumerate(prompts)]
    # check_prompt() refuses a text with half of a character: it costs its item only.
    good = [isinstance(prompt, str) and not half_character(prompt) for prompt in read]
    texts = [prompt for prompt, is_good in zip(read, good, strict=True) if is_good]
    encoded = iter(get_tokenizer()(texts)["input_ids"] if texts else ())
    pairs = zip(read, good, strict=True)
    return [next(encoded) if is_good else prompt for prompt, is_good in pairs]


def _read_prompt(index: int, prompt: Any) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping):
        raise ConfigurationError(
            f"Prompt {index} of the batch is a {type(prompt).__name__}; prompts are "
            f"strings, and token ids go to input_ids."
        )
    keys = ("prompt", "prompt_token_ids")
    extras = {name for name, value in prompt.items() if value is not None} - {*keys}
    text, ids = (prompt.get(name) for name in keys)
    if not extras and ids is not None:
        read: Sequence[int] = to_python(_to_list(ids))
        return read
    if not extras and isinstance(text, str):
        return text
    raise ConfigurationError(
        f"Prompt {index} of the batch is a mapping with {sorted(map(str, prompt))}; of "
        f"vLLM's forms, {{'prompt': text}} and {{'prompt_token_ids': ids}} are read. "
        f"Messages of a chat go to SGLangWrapper, or to engine.chat_completion()."
    )


def _to_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _for_each(value: Any, size: int, name: str) -> list[Any]:
    """Returns an option for each prompt, given for all of them or for each."""
    value = _to_list(value)
    if not isinstance(value, (list, tuple)):
        return [value] * size
    if len(value) != size:
        raise ConfigurationError(
            f"{len(value)} {name} values were given for {size} prompts; give one for "
            f"all, or one for each prompt."
        )
    return [to_python(item) for item in value]


def _merge(sampling_params: Any, keywords: Mapping[str, Any]) -> Any:
    if not keywords:
        return {} if sampling_params is None else sampling_params
    if isinstance(sampling_params, (list, tuple)):
        return [
            _merge(check_mapping("sampling_params", params), keywords)
            for params in sampling_params
        ]
    shared = check_mapping("sampling_params", sampling_params or {})
    for name in shared:
        if name in keywords:
            raise ConfigurationError(
                f"{name!r} is given in sampling_params and as a keyword; give one."
            )
    return {**shared, **keywords}


def check_logprobs_mode(mode: Any) -> LogProbsMode:
    """Returns ``mode`` if it is a :data:`.LogProbsMode`."""
    if mode in get_args(LogProbsMode):
        checked: LogProbsMode = mode
        return checked
    advice = {
        "raw_logprobs": " vLLM's 'raw_logprobs' is 'model' here.",
        "behavior": " It is written 'behaviour' here.",
        "processed_logprobs": " vLLM's 'processed_logprobs' is 'behaviour' here.",
    }
    raise ConfigurationError(
        f"logprobs_mode={mode!r} must be 'model', 'sampling' or 'behaviour'."
        f"{advice.get(mode, '') if isinstance(mode, str) else ''}"
    )


def _check_header(name: str, value: Any) -> None:
    # The value travels in an HTTP header, which takes neither line breaks nor other
    # alphabets.
    if value is not None and not (
        isinstance(value, str) and value.isascii() and value.isprintable() and value
    ):
        raise ConfigurationError(
            f"{name} must be a printable ASCII string, got {value!r}."
        )

"""One frozen request per prompt, from the caller's arguments to the payload. Pure.

:func:`to_batch` turns the arguments of :meth:`.AsyncSGLang.generate` into requests,
:func:`check_request` compares one with what the servers can do, and :func:`to_payload`
makes the content of a ``/generate`` call of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.behaviour import plan_behaviour
from torchrl_sglang.requests.sampling import (
    SAMPLING_ALIASES,
    SAMPLING_PARAMETERS,
    check_sampling_params,
    check_token_ids,
    hint,
)
from torchrl_sglang.requests.token_columns import (
    TokenColumn,
    check_columns,
    column_fields,
    find_columns,
)
from torchrl_sglang.support.checks import (
    check_flag,
    check_mapping,
    check_seconds,
    to_python,
)
from torchrl_sglang.support.texts import check_text, half_character
from torchrl_sglang.types import LogProbsMode, ServerCapabilities

GENERATE_TIMEOUT_SECONDS = 1800.0
"""Default timeout of a batch."""

STREAM_INTERVAL = 128
"""Tokens between two events of a stream: what is lost with a server is less."""

LIVE_INTERVAL = 4
"""The same where somebody is told of the tokens as they come."""

MOST_EVENTS = 512
"""Most events of such a stream."""


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
    score_response: bool = False
    """Set by the engine: the finished response is scored as a prompt, because the log-
    probabilities that the server gives while it generates are of another mode."""
    token_columns: Sequence[TokenColumn] = ()
    """Further quantities of each token; also given as names of ``TOKEN_COLUMNS``."""
    columns_from: int = 0
    """Set by the engine: first prompt token of which quantities that prompts have are
    asked for; those before it are known."""
    scored_from: int | None = None
    """Set by the engine: score the tokens of ``input_ids`` behind this position."""
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


_CALL_OPTIONS = {each.name for each in fields(Batch)} - {"requests"}
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
    known = {
        "input_ids",
        "logprobs_mode",
        "token_columns",
        *_PER_PROMPT,
        *_CALL_OPTIONS,
    }
    sampling = {name: options[name] for name in options.keys() - known}
    for name in sampling.keys() - {"n", *SAMPLING_PARAMETERS, *SAMPLING_ALIASES}:
        if name in VLLM_ARGUMENTS:
            raise ConfigurationError(
                f"{name!r} of vLLM is no argument of generate(): {VLLM_ARGUMENTS[name]}"
            )
        raise ConfigurationError(
            f"{name!r} is neither an argument of generate() nor a sampling "
            f"parameter.{hint(name, sorted(known))}"
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
    """Returns the token ids of each prompt."""
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
    good = [isinstance(each, str) and not half_character(each) for each in read]
    texts = [each for each, is_good in zip(read, good, strict=True) if is_good]
    encoded = iter(get_tokenizer()(texts)["input_ids"] if texts else ())
    pairs = zip(read, good, strict=True)
    return [next(encoded) if is_good else each for each, is_good in pairs]


def _read_prompt(index: int, prompt: Any) -> str | Sequence[int]:
    """Returns a text, or the token ids that vLLM's mapping has."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping):
        raise ConfigurationError(
            f"Prompt {index} of the batch is a {type(prompt).__name__}; prompts are "
            f"strings, and token ids go to input_ids."
        )
    known = ("prompt", "prompt_token_ids")
    others = {name for name, value in prompt.items() if value is not None} - {*known}
    text, ids = (prompt.get(name) for name in known)
    if not others and ids is not None:
        read: Sequence[int] = to_python(_to_list(ids))
        return read
    if not others and isinstance(text, str):
        return text
    raise ConfigurationError(
        f"Prompt {index} of the batch is a mapping with {sorted(map(str, prompt))}; of "
        f"vLLM's forms, {{'prompt': text}} and {{'prompt_token_ids': ids}} are read. "
        f"Messages of a chat go to SGLangWrapper, or to engine.chat_completion()."
    )


def _to_list(value: Any) -> Any:
    """Returns a tensor or an array as Python lists or numbers."""
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
    return [to_python(each) for each in value]


def _merge(sampling_params: Any, keywords: Mapping[str, Any]) -> Any:
    """Returns sampling parameters with those that were given as keywords."""
    if not keywords:
        return {} if sampling_params is None else sampling_params
    if isinstance(sampling_params, (list, tuple)):
        return [
            _merge(check_mapping("sampling_params", own), keywords)
            for own in sampling_params
        ]
    own = check_mapping("sampling_params", sampling_params or {})
    for name in own:
        if name in keywords:
            raise ConfigurationError(
                f"{name!r} is given in sampling_params and as a keyword; give one."
            )
    return {**own, **keywords}


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


def check_request(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    name: str,
    known: dict[int, dict[str, Any]],
) -> GenerateRequest:
    """Returns a request that the servers can serve, under SGLang's names."""
    check_prompt(request.input_ids, capabilities, name)
    # Most requests of a batch share one mapping, which is checked once.
    given = request.sampling_params
    if id(given) not in known:
        known[id(given)] = check_sampling_params(given, capabilities)
    params = known[id(given)]
    number, most = request.top_logprobs, capabilities.vocab_size
    if type(number) is not int or not 0 <= number <= most:
        raise ConfigurationError(
            f"top_logprobs={number!r} is not a number of tokens; give an integer in "
            f"[0, {most}] (the size of the vocabulary)."
        )
    _check_priority(request.priority, capabilities)
    request = plan_behaviour(request, params, capabilities)
    check_columns(request.token_columns, params, capabilities)
    if capabilities.uses_seeds and "sampling_seed" not in params:
        # The server would give all requests the same one.
        params = {**params, "sampling_seed": secrets.randbits(63)}
    return replace(request, sampling_params=params)


def _check_priority(priority: Any, capabilities: ServerCapabilities) -> None:
    if priority is None:
        return
    if type(priority) is not int or abs(priority) >= 2**31:
        raise ConfigurationError(
            f"priority={priority!r} is not an integer below 2**31; requests with a "
            f"greater one are begun first."
        )
    check_priorities(capabilities)


def check_priorities(capabilities: ServerCapabilities) -> None:
    """Raises :class:`.UnsupportedByServerError` if servers ignore priorities."""
    if not capabilities.args.enable_priority_scheduling:
        raise UnsupportedByServerError(
            "The servers begin requests in the order of arrival, whatever their "
            "priority: start them with AsyncSGLang.from_pretrained(..., "
            "enable_priority_scheduling=True, disable_priority_preemption=True), or "
            "leave priority out."
        )


def check_prompt(
    input_ids: Sequence[int], capabilities: ServerCapabilities, name: str = "The prompt"
) -> None:
    """Raises :class:`ConfigurationError` for a prompt that no server can take."""
    if isinstance(input_ids, str):
        check_text(name, input_ids)
    if isinstance(input_ids, str) or not isinstance(input_ids, Sequence):
        raise ConfigurationError(
            f"{name} is a {type(input_ids).__name__}; give a list of token ids."
        )
    if len(input_ids) == 0:
        raise ConfigurationError(
            f"{name} is empty; a prompt has at least one token (begin with the "
            f"tokenizer's bos token where there is nothing else)."
        )
    longest = longest_prompt(capabilities)
    if len(input_ids) > longest:
        raise ConfigurationError(
            f"{name} has {len(input_ids)} tokens, which leaves no room for a response: "
            f"the server takes at most {longest} prompt tokens (context "
            f"{capabilities.max_context}). Shorten it, or start the server with a "
            f"larger context_length."
        )
    check_token_ids(input_ids, capabilities, name)


def longest_prompt(capabilities: ServerCapabilities) -> int:
    """Returns the most tokens of a prompt that leave room for a response."""
    return min(capabilities.max_prompt, capabilities.max_context - 1)


def to_payload(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    *,
    cache_key: str,
    rid: str,
    adapter: str | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """Returns the JSON content of a ``/generate`` call.

    Source: ``GenerateReqInput`` in ``sglang/srt/managers/io_struct.py``.
    """
    own = not request.score_response
    start = 0 if request.return_prompt_logprobs else -1
    payload: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": _limited_params(request, capabilities),
        "return_logprob": request.return_prompt_logprobs
        or (request.wants_logprobs and own),
        "top_logprobs_num": request.top_logprobs if own else 0,
        "logprob_start_len": (
            start if request.scored_from is None else request.scored_from
        ),
        "extra_key": cache_key,
        "rid": rid,
    }
    payload |= column_fields(request.token_columns, request.columns_from, payload)
    if request.priority is not None:
        small_first = capabilities.args.schedule_low_priority_values_first
        payload["priority"] = -request.priority if small_first else request.priority
    limit = payload["sampling_params"]["max_new_tokens"]
    interval = STREAM_INTERVAL
    if request.on_tokens is not None:
        # An event has all tokens so far: of longer responses there are no more events.
        interval = max(LIVE_INTERVAL, limit // MOST_EVENTS)
    if stream and limit > interval:
        payload["stream"] = True
        payload["sampling_params"]["stream_interval"] = interval
    return payload if adapter is None else {**payload, "lora_path": adapter}


def _limited_params(
    request: GenerateRequest, capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns sampling parameters that are cut to what the context has room for."""
    params = dict(request.sampling_params)
    limit = response_limit(request, capabilities)
    if params.get("max_new_tokens") is not None:
        limit = min(params["max_new_tokens"], limit)
    params["max_new_tokens"] = limit
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], limit)
    return params


def cut_by_context(
    request: GenerateRequest, capabilities: ServerCapabilities
) -> str | None:
    """Returns a message if the context has no room for ``max_new_tokens``."""
    wanted = request.sampling_params.get("max_new_tokens")
    room = response_limit(request, capabilities)
    if wanted is None or wanted <= room:
        return None
    return (
        f"max_new_tokens={wanted} does not fit behind a prompt of "
        f"{len(request.input_ids)} tokens into the context of "
        f"{capabilities.max_context} tokens: the response has {room} at most, and "
        f"ends there with finish_reason 'length'."
    )


def response_limit(request: GenerateRequest, capabilities: ServerCapabilities) -> int:
    """Returns the largest possible number of response tokens."""
    longest = capabilities.max_context
    if request.score_response:
        # Prompt and response are sent as a prompt afterwards.
        longest = min(longest, capabilities.max_prompt)
    return longest - len(request.input_ids)

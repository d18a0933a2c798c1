"""THE plan of a request: the decisions about it before it is sent. Pure.

:func:`plan_request` compares a request with the servers' capabilities and decides once
which columns it has, whether its response is scored and can go on in another request,
and whether it avoids a router. The engine reads these decisions from the plan.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.resume import resume_request
from torchrl_sglang.requests.sampling import (
    GREEDY_TEMPERATURE,
    SAMPLING_PARAMETERS,
    check_sampling_params,
    check_token_ids,
    effective_rows,
    filters_of,
    temperature_of,
)
from torchrl_sglang.requests.token_columns import (
    LOG_PROBS,
    SAMPLING_SUPPORT,
    TOKEN_COLUMNS,
    WHOLE_VOCABULARY,
    TokenColumn,
    check_columns,
    columns_of_mode,
)
from torchrl_sglang.support.texts import check_text
from torchrl_sglang.types import Completion, ServerCapabilities, TokenLayout

STREAM_INTERVAL = 128
"""Tokens between two events of a stream; a server that ends loses at most so many."""

LIVE_INTERVAL = 4
"""Tokens between two events of a stream with ``on_tokens``."""

MOST_EVENTS = 512
"""Most events of such a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """A checked request, and the decisions that sending and reading it depend on."""

    request: GenerateRequest
    """Request under SGLang's names, its sampling parameters checked."""
    columns: tuple[tuple[TokenColumn, TokenLayout], ...]
    """Token columns, with the columns of the mode, and the layouts of their values."""
    capabilities: ServerCapabilities
    """Capabilities of the servers."""
    temperature: float | None
    """Temperature that the servers sample with; ``None`` if it is unknown."""
    token_filter: str
    """Parameter by which sampling leaves tokens out; empty if it leaves none out."""
    replayable: bool
    """Whether temperature and support alone decide what tokens are drawn from: no
    penalty, bias or grammar does."""
    scores: bool | None
    """Whether the finished response is sent again as a prompt, because log-probs of
    decoding are not of the requested mode; ``None`` until :meth:`settle`."""
    scored_from: int | None = None
    """Position of the prompt behind which tokens are scored; ``None``: none are."""
    resumable: bool
    """Whether another request can go on from the tokens of the response."""
    survives_retraction: bool
    """Whether the response stays exact when a server retracts the request, which drops
    its KV cache and computes it again later."""
    direct: bool
    """Whether the request is sent around a router, which would drop a part of it."""

    @property
    def limit(self) -> int:
        """Most tokens of a response that context and scoring leave room for."""
        length = self.capabilities.max_context
        if self.scores:
            # Prompt and response are sent as a prompt afterwards.
            length = min(length, self.capabilities.max_prompt)
        return length - len(self.request.input_ids)

    @property
    def shortage(self) -> str | None:
        """Warning that the context is too short for ``max_new_tokens``, if it is."""
        number = self.request.sampling_params.get("max_new_tokens")
        if number is None or number <= self.limit:
            return None
        return (
            f"max_new_tokens={number} does not fit behind a prompt of "
            f"{len(self.request.input_ids)} tokens into the context of "
            f"{self.capabilities.max_context} tokens: the response has {self.limit} at "
            f"most, and ends there with finish_reason 'length'."
        )

    def settle(self, ignores_temperature: bool | None) -> RequestPlan:
        """Decides whether the response is scored.

        ``ignores_temperature``: whether servers' log-probs do; ``None``: unknown.
        """
        if self.request.logprobs_mode == "model":
            return _with_room(replace(self, scores=not ignores_temperature))
        if ignores_temperature is False:
            return replace(self, scores=False)
        mode, bound = self.request.logprobs_mode, None
        if mode == "behaviour":
            bound = self.capabilities.args.sampling_mask_max_tokens
        remedy = "" if bound is None else f", or sample with a top_k of 1 to {bound}"
        reason = (
            "depends on how the servers were started, and they differ, or one of "
            "them did not tell; try again, or use logprobs_mode='model'."
            if ignores_temperature is None
            else "cannot be had: the server takes log-probabilities before it "
            "applies the temperature. Start it with environment="
            "{'SGLANG_RETURN_ORIGINAL_LOGPROB': '0'}, or use "
            f"logprobs_mode='model'{remedy}."
        )
        temperature = self.request.sampling_params.get("temperature")
        raise UnsupportedByServerError(
            f"logprobs_mode={mode!r} with temperature={temperature!r} {reason}"
        )

    def payload(
        self,
        *,
        cache_key: str,
        rid: str,
        adapter: str | None = None,
        stream: bool = False,
    ) -> dict[str, Any]:
        """Returns the JSON content of a ``/generate`` call.

        Source: ``GenerateReqInput`` in ``sglang/srt/managers/io_struct.py``.
        """
        request = self.request
        start = self.scored_from
        if start is None and request.return_prompt_logprobs:
            start = 0
        params = dict(request.sampling_params)
        limit = params["max_new_tokens"] = min(
            self.limit, params.get("max_new_tokens", self.limit)
        )
        if "min_new_tokens" in params:
            params["min_new_tokens"] = min(params["min_new_tokens"], limit)
        payload: dict[str, Any] = {
            "input_ids": list(request.input_ids),
            "sampling_params": params,
            "return_logprob": request.return_prompt_logprobs
            or (request.wants_logprobs and not self.scores),
            "top_logprobs_num": 0 if self.scores else request.top_logprobs,
            "extra_key": cache_key,
            "rid": rid,
        }
        if start is not None:
            payload["logprob_start_len"] = start
        payload |= self._column_fields(payload)
        payload.setdefault("logprob_start_len", -1)
        if request.priority is not None:
            small_first = self.capabilities.args.schedule_low_priority_values_first
            payload["priority"] = -request.priority if small_first else request.priority
        interval = STREAM_INTERVAL
        if request.on_tokens is not None:
            # An event has all tokens so far: longer responses have no more events.
            interval = max(LIVE_INTERVAL, limit // MOST_EVENTS)
        if stream and limit > interval:
            payload["stream"] = True
            params["stream_interval"] = interval
        return payload if adapter is None else {**payload, "lora_path": adapter}

    def _column_fields(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that request the columns, beside ``payload``'s own."""
        sources: dict[str, tuple[str, Any]] = {}
        for column, _ in self.columns:
            for name, value in column.request(self.request.columns_from).items():
                default = "the request itself", payload.get(name) or value
                source, other = sources.get(name, default)
                if other != value:
                    raise ConfigurationError(
                        f"The token column {column.name!r} asks for {name}={value!r}, "
                        f"and {source!r} for {other!r}; they cannot be had in one "
                        f"request."
                    )
                sources[name] = column.name, value
        return {name: value for name, (_, value) in sources.items()}

    def resume(self, whole: Completion) -> RequestPlan | None:
        """Plans the rest of the response; ``None``: no token may follow."""
        request = resume_request(self.request, whole, self.capabilities)
        if request is None:
            return None
        tell, tokens = self.request.on_tokens, whole.token_ids
        if tell is not None:
            request = replace(request, on_tokens=lambda ids: tell([*tokens, *ids]))
        return replace(self, request=request)

    def prefill(self) -> RequestPlan:
        """Returns the plan of a request that computes the prompt alone."""
        return self._without_response(return_logprobs=False, top_logprobs=0)

    def score(self, whole: Completion) -> RequestPlan:
        """Returns the plan that scores the response under the model's distribution."""
        prompt = self.request.input_ids
        plan = self._without_response(
            input_ids=[*prompt, *whole.token_ids],
            return_logprobs=True,
            return_prompt_logprobs=False,
        )
        # The first scored token gets no log-prob: scoring begins at the last of the
        # prompt.
        return replace(plan, scored_from=len(prompt) - 1)

    def _without_response(self, **changes: Any) -> RequestPlan:
        params = {"max_new_tokens": 0}
        request = replace(self.request, sampling_params=params, **changes)
        direct = request.on_tokens is not None
        return replace(self, request=request, columns=(), scores=False, direct=direct)


def plan_request(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    name: str = "The prompt",
    checked_params: dict[int, dict[str, Any]] | None = None,
) -> RequestPlan:
    """Checks a request and returns its plan.

    ``name`` is the prompt's in messages. ``checked_params`` has checked sampling
    parameters by the id of their mapping, which most requests of a batch share.
    """
    _check_top_logprobs(request.top_logprobs, capabilities)
    _check_priority(request.priority, capabilities)
    check_prompt(request.input_ids, capabilities, name)
    shared = {} if checked_params is None else checked_params
    key = id(request.sampling_params)
    if key not in shared:
        shared[key] = check_sampling_params(request.sampling_params, capabilities)
    params = shared[key]
    if capabilities.uses_seeds and "sampling_seed" not in params:
        # The server would give all requests the same one.
        params = {**params, "sampling_seed": secrets.randbits(63)}
    return _with_room(_plan(replace(request, sampling_params=params), capabilities))


def _plan(request: GenerateRequest, capabilities: ServerCapabilities) -> RequestPlan:
    """Returns the plan of a request whose values are checked."""
    params = request.sampling_params
    temperature = temperature_of(params, capabilities)
    filters = filters_of(params, capabilities)
    if temperature is not None and temperature < GREEDY_TEMPERATURE:
        filters = {"temperature": temperature}
    rows = effective_rows(params, capabilities)
    changing = [row for row in rows.values() if row.neutral]
    counting = {name: row for name, row in rows.items() if row.counts_tokens}
    scores = _needs_scores(request, temperature, bool(changing))
    columns = _plan_columns(request, filters, capabilities)
    return RequestPlan(
        request=request,
        columns=tuple((column, column.layout(capabilities)) for column in columns),
        capabilities=capabilities,
        temperature=temperature,
        token_filter=next(iter(filters), ""),
        replayable=not any(
            # A support has the tokens that a grammar left.
            not filters or not (row.needs_grammar or row.only_bars)
            for row in changing
        ),
        scores=scores if LOG_PROBS not in columns else False,
        resumable=not any(row.needs_grammar for row in rows.values())
        # A count by the server's default is not known here.
        and all(row.counts_here and name in params for name, row in counting.items()),
        # A server computes late columns again, with the new weights.
        survives_retraction=not (counting or any(column.late for column in columns)),
        direct=any(SAMPLING_PARAMETERS[name].dropped_by_router for name in params)
        or any(column.dropped_by_router for column in columns)
        or request.on_tokens is not None,
    )


def _needs_scores(
    request: GenerateRequest, temperature: float | None, changes_logits: bool
) -> bool | None:
    """Returns whether a response is scored; ``None`` if that depends on the servers.

    For a sampled token SGLang reports ``log_softmax(logits)`` after penalties, biases,
    ``min_new_tokens`` and grammar and, unless it was started with
    ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``, after the temperature
    (``sglang/srt/layers/sampler.py``). For prompt tokens it always reports the model's
    own. So where the two differ, a finished response is sent once more, as a prompt,
    whose beginning is in the prefix cache.
    """
    generates = request.sampling_params.get("max_new_tokens") != 0
    if not (request.wants_logprobs and generates):
        return False
    if request.logprobs_mode == "model" and changes_logits:
        return True
    scaled = temperature is None or not (
        temperature < GREEDY_TEMPERATURE or temperature == 1
    )
    return None if scaled else False


def _with_room(plan: RequestPlan) -> RequestPlan:
    """Returns a plan, or raises if it scores a response that has no room for it."""
    if plan.scores and plan.limit < 1:
        raise ConfigurationError(
            f"A prompt of {len(plan.request.input_ids)} tokens leaves no room for "
            f"scoring its response: the server takes at most "
            f"{plan.capabilities.max_prompt} prompt tokens, and a response is scored "
            f"as a part of one. Shorten it, or start the server with a larger "
            f"context_length."
        )
    return plan


def _plan_columns(
    request: GenerateRequest,
    filters: Mapping[str, Any],
    capabilities: ServerCapabilities,
) -> tuple[TokenColumn, ...]:
    """Returns the columns of a request and those that its mode of log-probs needs."""
    params = request.sampling_params
    columns = columns_of_mode(request.logprobs_mode, tuple(request.token_columns))
    if request.logprobs_mode == "behaviour":
        support = TOKEN_COLUMNS[SAMPLING_SUPPORT]
        problem = support.problem and support.problem(params, capabilities)
        if problem and not filters:
            columns = tuple(
                WHOLE_VOCABULARY if column.name == SAMPLING_SUPPORT else column
                for column in columns
            )
        elif problem:
            name, value = next(iter(filters.items()))
            raise _no_support(f"{name}={value!r}", problem, capabilities)
        elif request.top_logprobs:
            raise ConfigurationError(
                f"logprobs_mode='behaviour' has the log-prob of the sampled token only "
                f"where {next(iter(filters), 'top_k')} leaves tokens out, and "
                f"top_logprobs={request.top_logprobs} was asked for; leave one out."
            )
        else:
            columns = (*columns, LOG_PROBS)
    check_columns(columns, params, capabilities)
    return columns


def _no_support(
    setting: str, problem: str, capabilities: ServerCapabilities
) -> UnsupportedByServerError:
    if capabilities.args.sampling_mask_max_tokens is None:
        return UnsupportedByServerError(
            f"logprobs_mode='behaviour' with {setting} needs to know which tokens were "
            f"left, and SGLang {capabilities.version} does not report it: update the "
            f"servers to 0.5.20 or later, or sample with a temperature above 0 alone, "
            f"without a filter of tokens."
        )
    return UnsupportedByServerError(
        f"logprobs_mode='behaviour' with {setting} needs to know which tokens were "
        f"left, and {problem} Once is enough: in generate_kwargs of a wrapper, or in "
        f"default_sampling_params of a gateway."
    )


def _check_top_logprobs(number: Any, capabilities: ServerCapabilities) -> None:
    if type(number) is not int or not 0 <= number <= capabilities.vocab_size:
        raise ConfigurationError(
            f"top_logprobs={number!r} is not a number of tokens; give an integer in "
            f"[0, {capabilities.vocab_size}] (the size of the vocabulary)."
        )


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
    longest = capabilities.longest_prompt
    if len(input_ids) > longest:
        raise ConfigurationError(
            f"{name} has {len(input_ids)} tokens, which leaves no room for a response: "
            f"the server takes at most {longest} prompt tokens (context "
            f"{capabilities.max_context}). Shorten it, or start the server with a "
            f"larger context_length."
        )
    check_token_ids(input_ids, capabilities, name)

"""The generate protocol, as pure functions: checks, requests and replies.

Nothing that a server cannot survive passes :func:`check_request` (a token id outside
the vocabulary kills some versions), and no reply that lacks what was asked for passes
:func:`parse_completion`: a log-probability is never invented.

Format: SGLang's native ``/generate`` (``sglang/srt/managers/io_struct.py``,
``GenerateReqInput``; ``sglang/srt/sampling/sampling_params.py``).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.backends.support.checks import to_python
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import (
    Completion,
    LogProbsMode,
    ServerCapabilities,
    VersionSpan,
)

__all__ = [
    "SAMPLING_ALIASES",
    "SAMPLING_PARAMETERS",
    "GenerateRequest",
    "check_prompt",
    "check_sampling_params",
    "check_top_log_probs",
    "hint",
    "parse_completion",
    "to_payload",
]

STREAM_INTERVAL = 2**30
"""Tokens between two events of a response: only its first one and its end are sent."""

_NUMBER = (int, float)
_TEXTS = (str, list, tuple)

SAMPLING_PARAMETERS: dict[str, tuple[tuple[type, ...], float, float]] = {
    # name: (types, least value, greatest value); the limits are SGLang's own.
    "ebnf": ((str,), 0, 0),
    "frequency_penalty": (_NUMBER, -2.0, 2.0),
    "ignore_eos": ((bool,), 0, 1),
    "json_schema": ((str,), 0, 0),
    "logit_bias": ((dict,), 0, 0),
    "max_new_tokens": ((int,), 0, math.inf),
    "min_new_tokens": ((int,), 0, math.inf),
    "min_p": (_NUMBER, 0.0, 1.0),
    "no_stop_trim": ((bool,), 0, 1),
    "presence_penalty": (_NUMBER, -2.0, 2.0),
    "regex": ((str,), 0, 0),
    "repetition_penalty": (_NUMBER, 0.0, 2.0),
    "sampling_seed": ((int,), -(2**63), 2**63 - 1),
    "skip_special_tokens": ((bool,), 0, 1),
    "spaces_between_special_tokens": ((bool,), 0, 1),
    "stop": (_TEXTS, 0, 0),
    "stop_regex": (_TEXTS, 0, 0),
    "stop_token_ids": ((list, tuple, set, frozenset), 0, 0),
    "structural_tag": ((str,), 0, 0),
    "temperature": (_NUMBER, 0.0, math.inf),
    # SGLang's own value for the whole vocabulary; from 2**31 on a server dies.
    "top_k": ((int,), -1, 2**30),
    "top_p": (_NUMBER, 0.0, 1.0),
}
"""Every sampling parameter that is sent, with its types and limits."""

SAMPLING_ALIASES = {
    "grammar": "ebnf",
    "guided_grammar": "ebnf",
    "guided_regex": "regex",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop_sequences": "stop",
}
"""A name of TorchRL's or vLLM's -> SGLang's name for the same value."""

LARGEST_BIAS = 3e38
"""Beyond it a bias is infinite in the float32 of the logits."""

_NAN = "NaN happened"
"""The stop text that SGLang claims to have matched where a sampled id is none."""

_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
_NEEDS_TOKENIZER = ("stop", "stop_regex")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to continue or to score."""

    input_ids: Sequence[int]
    """Prompt token ids; never empty."""
    sampling_params: Mapping[str, Any]
    """Checked parameters under SGLang's names."""
    return_log_probs: bool = False
    """Ask for the log-probability of every response token."""
    return_prompt_log_probs: bool = False
    """Ask for the log-probability of every prompt token too."""
    top_log_probs: int = 0
    """Ask for this many of the likeliest tokens in each response token's place."""
    logprobs_mode: LogProbsMode = "model"
    """Whose log-probabilities of the response."""
    score_response: bool = False
    """The server's log-probabilities of sampled tokens are not those asked for: the
    response is scored when it is finished, as a prompt is."""
    scored_from: int | None = None
    """Score the tokens of ``input_ids`` behind this position; see
    :func:`.log_probs.to_scoring_request`."""
    request_id: str | None = None
    """Name by which the caller can abort it."""
    session_id: str | None = None
    """Requests of one session go to one server, where their prefix is cached."""
    adapter: str | None = None
    """LoRA adapter to compute it with: a name, ``""`` for none, or ``None`` for the
    engine's default when it is sent."""


def check_sampling_params(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns ``params`` as the server takes them, without unset ones.

    Raises:
        ConfigurationError: for an unknown name, a wrong type or a value out of range;
            the message names the value and the nearest valid name.
        UnsupportedByServerError: for one that this server cannot honour.
    """
    checked: dict[str, Any] = {}
    for name, given in params.items():
        value = to_python(given)
        if name == "n":
            raise ConfigurationError(
                f"n={value!r} is not sent to the engine; give the prompt that many "
                f"times (SGLangWrapper does it for num_samples)."
            )
        target = SAMPLING_ALIASES.get(name, name)
        if target not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name!r} is not a sampling parameter of SGLang.{hint(str(name))}"
            )
        if value is None:
            continue
        if target in checked:
            raise ConfigurationError(
                f"The sampling parameter {target!r} is given twice, once as {name!r}; "
                f"give one."
            )
        types, least, greatest = SAMPLING_PARAMETERS[target]
        is_bool = isinstance(value, bool)
        if not isinstance(value, types) or (is_bool and bool not in types):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ConfigurationError(
                f"The sampling parameter {name}={value!r} is a "
                f"{type(value).__name__}; it must be {wanted}."
            )
        if isinstance(value, _NUMBER) and not (
            least <= value <= greatest and value != math.inf
        ):
            end = ")" if greatest == math.inf else "]"
            raise ConfigurationError(
                f"The sampling parameter {name}={value!r} is out of range; it must lie "
                f"in [{least:g}, {greatest:g}{end}."
            )
        if target in _GRAMMARS and not capabilities.has_grammar:
            raise UnsupportedByServerError(
                f"{name!r} needs a grammar backend, and the server was started with "
                f"none; start it with grammar_backend='xgrammar'."
            )
        if target in _NEEDS_TOKENIZER and not capabilities.has_tokenizer:
            raise UnsupportedByServerError(
                f"{name!r} is matched on text, and the server was started with "
                f"skip_tokenizer_init=True; give 'stop_token_ids'."
            )
        checked[target] = value
    _check_values(checked, capabilities)
    return checked


def _check_seed(params: Mapping[str, Any], capabilities: ServerCapabilities) -> None:
    # Greedy sampling draws nothing.
    honoured = capabilities.uses_seeds or temperature_of(params, capabilities) == 0
    if "sampling_seed" in params and not honoured:
        raise UnsupportedByServerError(
            f"sampling_seed={params['sampling_seed']!r} would be ignored: the server "
            f"was started without enable_deterministic_inference=True. Start it with "
            f"that, leave the seed out, or sample with temperature=0."
        )


def temperature_of(
    params: Mapping[str, Any], capabilities: ServerCapabilities
) -> float | None:
    """Returns the temperature that a request is sampled with, where it is known."""
    value = params.get("temperature")
    if value is None:
        value = capabilities.default_sampling_params.get("temperature")
    if value is None:
        return 1.0
    return value if isinstance(value, _NUMBER) else None


def _check_values(params: dict[str, Any], capabilities: ServerCapabilities) -> None:
    _check_seed(params, capabilities)
    if params.get("top_k") == 0:
        raise ConfigurationError(
            "The sampling parameter top_k=0 keeps no token; give -1 for no limit, or "
            "at least 1."
        )
    for name in ("top_p", "repetition_penalty"):
        if params.get(name) == 0:
            raise ConfigurationError(
                f"The sampling parameter {name}=0 is out of range; it must be greater "
                f"than 0."
            )
    least, most = params.get("min_new_tokens", 0), params.get("max_new_tokens")
    if most is not None and least > most:
        raise ConfigurationError(
            f"min_new_tokens={least} is more than max_new_tokens={most}."
        )
    if params.get("ignore_eos") and params.get("stop_token_ids"):
        raise ConfigurationError(
            f"With ignore_eos=True SGLang ignores stop_token_ids="
            f"{list(params['stop_token_ids'])} as well; give only one of the two."
        )
    for name in _NEEDS_TOKENIZER:
        if name in params:
            params[name] = _check_texts(name, params[name])
    if "stop_token_ids" in params:
        stops = list(params["stop_token_ids"])
        check_token_ids(stops, capabilities, "stop_token_ids")
        params["stop_token_ids"] = sorted(set(stops))
    if "logit_bias" in params:
        params["logit_bias"] = _check_bias(params["logit_bias"], capabilities)


def _check_texts(name: str, value: Any) -> list[str]:
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
    bias: Mapping[Any, Any], capabilities: ServerCapabilities
) -> dict[str, float]:
    """Returns ``logit_bias`` as JSON has it: with text keys, and finite values."""
    checked: dict[str, float] = {}
    for token, value in bias.items():
        try:
            token_id = int(token)
        except (TypeError, ValueError):
            token_id = token
        check_token_ids([token_id], capabilities, "logit_bias")
        if not isinstance(value, _NUMBER) or not abs(value) <= LARGEST_BIAS:
            raise ConfigurationError(
                f"logit_bias gives the token {token} the value {value!r}; it must be "
                f"a number in [{-LARGEST_BIAS:g}, {LARGEST_BIAS:g}] (write -1e9 for a "
                f"token that shall never come)."
            )
        checked[str(token_id)] = float(value)
    return checked


def hint(name: str, others: Sequence[str] = ()) -> str:
    """Returns the end of a message about an unknown name: the nearest valid one."""
    valid = sorted({*SAMPLING_PARAMETERS, *others})
    near = difflib.get_close_matches(name, valid, n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" The valid ones are {', '.join(valid)}."


def check_token_ids(
    token_ids: Sequence[int], capabilities: ServerCapabilities, what: str
) -> None:
    """Raises :class:`ConfigurationError` unless all ids lie in the vocabulary."""
    if not token_ids:
        return
    integers = set(map(type, token_ids)) == {int}
    if integers and min(token_ids) >= 0 and max(token_ids) < capabilities.vocab_size:
        return
    for token in token_ids:
        if type(token) is not int:
            raise ConfigurationError(
                f"{what} holds {token!r}, a {type(token).__name__}; token ids are "
                f"Python integers (tolist() turns a tensor or an array into them)."
            )
        if not 0 <= token < capabilities.vocab_size:
            raise ConfigurationError(
                f"{what} holds the token id {token}, which is outside the vocabulary "
                f"of {capabilities.model_path!r}: ids lie in "
                f"[0, {capabilities.vocab_size}). Is this the served model's tokenizer?"
            )


def check_prompt(
    input_ids: Sequence[int], capabilities: ServerCapabilities, what: str = "The prompt"
) -> None:
    """Checks one prompt before it can reach a server.

    Raises:
        ConfigurationError: if it is empty, holds an id outside the vocabulary, or
            leaves no room for a response.
    """
    if not isinstance(input_ids, Sequence):
        raise ConfigurationError(
            f"{what} is a {type(input_ids).__name__}; give a list of token ids."
        )
    if len(input_ids) == 0:
        raise ConfigurationError(
            f"{what} is empty; a prompt has at least one token (begin with the "
            f"tokenizer's bos token where there is nothing else)."
        )
    longest = min(capabilities.max_prompt, capabilities.max_context - 1)
    if len(input_ids) > longest:
        raise ConfigurationError(
            f"{what} has {len(input_ids)} tokens, which leaves no room: the server "
            f"takes at most {longest} prompt tokens (context "
            f"{capabilities.max_context}). Shorten it, or start the server with a "
            f"larger context_length."
        )
    check_token_ids(input_ids, capabilities, what)


def check_top_log_probs(number: int, capabilities: ServerCapabilities) -> None:
    """Raises :class:`ConfigurationError` unless so many tokens can be named."""
    largest = capabilities.vocab_size
    if type(number) is not int or not 0 <= number <= largest:
        raise ConfigurationError(
            f"top_logprobs={number!r} is not a number of tokens; give an integer in "
            f"[0, {largest}] (the size of the vocabulary)."
        )


def to_payload(
    requests: Sequence[GenerateRequest],
    capabilities: ServerCapabilities,
    *,
    cache_key: str,
    rids: Sequence[str],
    adapters: Sequence[str | None] = (),
    stream: bool = False,
) -> dict[str, Any]:
    """Returns the JSON content of one ``/generate`` call for a batch of requests.

    Args:
        requests: at least one.
        capabilities: of the server that it goes to.
        cache_key: separates prefix-cache entries; entries of other keys are not seen.
        rids: what the server shall call each request.
        adapters: what the server calls the LoRA adapter of each; by default none. It
            separates prefix-cache entries by them.
        stream: have each response sent when it is finished; its events carry
            ``index``.
    """
    params = []
    for request in requests:
        room = response_room(request, capabilities)
        asked = request.sampling_params.get("max_new_tokens")
        limit = room if asked is None else min(asked, room)
        own = {**request.sampling_params, "max_new_tokens": limit}
        if "min_new_tokens" in own:
            own["min_new_tokens"] = min(own["min_new_tokens"], limit)
        if stream:
            own["stream_interval"] = STREAM_INTERVAL
        params.append(own)
    payload = {
        "input_ids": [list(request.input_ids) for request in requests],
        "sampling_params": params,
        "return_logprob": [
            request.return_prompt_log_probs
            or (wants_log_probs(request) and not request.score_response)
            for request in requests
        ],
        "top_logprobs_num": [
            0 if request.score_response else request.top_log_probs
            for request in requests
        ],
        "logprob_start_len": [_score_start(request) for request in requests],
        "extra_key": [cache_key] * len(requests),
        "rid": list(rids),
        "stream": stream,
    }
    if any(adapters):
        payload["lora_path"] = list(adapters)
    if len(requests) > 1:
        return payload
    # The router takes lists for one prompt only.
    return {
        name: value[0] if isinstance(value, list) else value
        for name, value in payload.items()
    }


def response_room(request: GenerateRequest, capabilities: ServerCapabilities) -> int:
    """Returns the most tokens that the response to a request can have."""
    longest = capabilities.max_context
    if request.score_response:
        # It has to fit in as a prompt afterwards.
        longest = min(longest, capabilities.max_prompt)
    return longest - len(request.input_ids)


def wants_log_probs(request: GenerateRequest) -> bool:
    """Returns whether any log-probability of the response is asked for."""
    return request.return_log_probs or request.top_log_probs > 0


def _score_start(request: GenerateRequest) -> int:
    if request.scored_from is not None:
        return request.scored_from
    return 0 if request.return_prompt_log_probs else -1


def parse_completion(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    *,
    vocab_size: int,
    server: str,
    sent_version: str | None = None,
) -> Completion:
    """Returns what one item of a reply says.

    Args:
        reply: one item of the answer to ``/generate``.
        request: what was asked.
        vocab_size: of the served model.
        server: what messages call the server.
        sent_version: version of the weights when the request was sent. Of a response
            whose server names only the version of its end, another one tells that the
            versions of its tokens are unknown.

    Raises:
        GenerationAbortedError: if the response was cut off.
        RequestRefusedError: if it was aborted because the request is wrong.
        ServerUnavailableError: if the reply lacks something that was asked for.
    """
    try:
        return _parse(reply, request, vocab_size, server, sent_version)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerUnavailableError(
            f"{server} sent a malformed reply ({error!r}): {reply!r:.300}"
        ) from error


def _parse(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    vocab_size: int,
    server: str,
    sent_version: str | None,
) -> Completion:
    meta = reply["meta_info"]
    token_ids = reply["output_ids"]
    reason = meta["finish_reason"]
    kind = reason["type"]
    if kind == "abort":
        raise _abort_error(reason, len(token_ids), server)
    if reason.get("matched") == _NAN:
        raise GenerationAbortedError(
            f"{server} ended a response after {len(token_ids)} tokens, the last of "
            f"which is made up: the model's logits were not numbers (NaN). Check the "
            f"weights that were sent last."
        )
    if kind not in ("stop", "length"):
        raise ServerUnavailableError(
            f"{server} ended a response for an unknown reason: {reason!r}."
        )
    if len(token_ids) != meta.get("completion_tokens", len(token_ids)):
        raise ServerUnavailableError(
            f"{server} sent {len(token_ids)} tokens of a response and counts "
            f"{meta['completion_tokens']}; the reply is cut short."
        )
    log_probs = prompt_log_probs = None
    own_scores = not request.score_response
    if request.scored_from is not None:
        scored = request.input_ids[request.scored_from :]
        values = _log_probs(meta, "input_token_logprobs", scored, vocab_size, server)
        log_probs = values[1:]
    elif request.return_log_probs and own_scores:
        log_probs = _log_probs(
            meta, "output_token_logprobs", token_ids, vocab_size, server
        )
    if request.return_prompt_log_probs:
        prompt_log_probs = _log_probs(
            meta, "input_token_logprobs", request.input_ids, vocab_size, server
        )
    top_token_ids = top_log_probs = None
    if request.top_log_probs and own_scores:
        if request.scored_from is None:
            rows = meta.get("output_top_logprobs") or []
        else:
            rows = (meta.get("input_top_logprobs") or [])[1:]
        top_token_ids, top_log_probs = _top_log_probs(
            rows,
            len(token_ids) if request.scored_from is None else len(log_probs or ()),
            request.top_log_probs,
            server,
        )
    final = meta.get("weight_version")
    versions = _version_spans(meta, len(token_ids), sent_version)
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        logprobs_mode=(
            request.logprobs_mode if wants_log_probs(request) and own_scores else None
        ),
        top_token_ids=top_token_ids,
        top_log_probs=top_log_probs,
        prompt_log_probs=prompt_log_probs,
        finish_reason=kind,
        matched_stop=reason.get("matched"),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        versions=versions,
        weight_version=None if final is None else str(final),
        mixed_state=(
            # What is not computed again when the weights change rests on older ones.
            int(meta.get("num_retractions") or 0) < len(versions) - 1
            or (not versions and bool(token_ids))
        ),
        text=reply.get("text"),
    )


def _log_probs(
    meta: Mapping[str, Any],
    key: str,
    token_ids: Sequence[int],
    vocab_size: int,
    server: str,
) -> list[float]:
    # Each entry is [log-prob, token id, text]; the first prompt token has no context.
    entries = meta.get(key)
    if entries is None or len(entries) != len(token_ids):
        found = "none" if entries is None else str(len(entries))
        raise ServerUnavailableError(
            f"{server} was asked for {key} of {len(token_ids)} tokens and sent {found}."
        )
    values = [entry[0] for entry in entries]
    # The server writes the last id of the vocabulary as 0 (its value is the right one).
    last = vocab_size - 1
    if any(
        entry[1] != token and not (token == last and entry[1] == 0)
        for entry, token in zip(entries, token_ids, strict=True)
    ):
        raise ServerUnavailableError(
            f"{server} sent {key} of other tokens than the ones they belong to."
        )
    if values and values[0] is None and key == "input_token_logprobs":
        values[0] = math.nan
    if None in values:
        raise ServerUnavailableError(
            f"{server} left the log-probability at position {values.index(None)} of "
            f"{key} unset, as it does where the logits are not numbers (NaN). Check "
            f"the weights that were sent last."
        )
    return values


def _top_log_probs(
    rows: Sequence[Any], length: int, number: int, server: str
) -> tuple[list[list[int]], list[list[float]]]:
    # For each token a list of [log-prob, token id, text], the likeliest first.
    if len(rows) != length or any(len(row or ()) != number for row in rows):
        raise ServerUnavailableError(
            f"{server} was asked for the {number} likeliest tokens in the place of "
            f"each of {length} and sent {[len(row or ()) for row in rows]!r:.100}."
        )
    return (
        [[int(entry[1]) for entry in row] for row in rows],
        [[float(entry[0]) for entry in row] for row in rows],
    )


def _version_spans(
    meta: Mapping[str, Any], length: int, sent_version: str | None
) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans:
        return tuple(
            VersionSpan(
                version=str(span["version"]), start=span["start"], end=span["end"]
            )
            for span in spans
        )
    version = meta.get("weight_version")
    if version is None or (sent_version is not None and str(version) != sent_version):
        return ()
    return (VersionSpan(version=str(version), start=0, end=length),)


def _abort_error(reason: Mapping[str, Any], length: int, server: str) -> Exception:
    message = reason.get("message") or "Unknown error"
    status = reason.get("status_code")
    if status is not None and 400 <= int(status) < 500:
        refused = RequestRefusedError(
            f"{server} refused the request (HTTP {int(status)}): {message}"
        )
        refused.status = int(status)
        return refused
    return GenerationAbortedError(
        f"{server} aborted a response after {length} tokens ({message}); it is not a "
        f"finished one. Was generation paused with mode 'abort', or the request "
        f"aborted? Send it again."
    )

"""What a caller asks for, as checked requests: pure but for the tokenizer.

A batch can be given in many forms; what leaves this file is one request for each
prompt, or the error that is the prompt's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torchrl_sglang.backends.generation.protocol import (
    GenerateRequest,
    check_prompt,
    check_top_log_probs,
)
from torchrl_sglang.backends.generation.sampling import (
    SAMPLING_ALIASES,
    SAMPLING_PARAMETERS,
    check_sampling_params,
    hint,
)
from torchrl_sglang.backends.support.checks import check_flag, check_mapping
from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.types import LogProbsMode, ServerCapabilities

__all__ = [
    "Batch",
    "Flags",
    "check_sampling_keywords",
    "merge_params",
    "prepare",
    "to_token_ids",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What is asked for beside the tokens: for all prompts, or for each one."""

    return_logprobs: bool | Sequence[bool] = False
    return_prompt_logprobs: bool | Sequence[bool] = False
    top_logprobs: int | Sequence[int] = 0
    request_ids: Sequence[str] | None = None
    session_ids: str | Sequence[str | None] | None = None
    adapter: str | Sequence[str | None] | None = None
    logprobs_mode: LogProbsMode = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A checked batch."""

    size: int
    """Number of prompts."""
    requests: dict[int, GenerateRequest]
    """Position -> what to send."""
    errors: dict[int, SGLangError]
    """Position -> why it is not sent."""


def to_token_ids(
    prompts: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    get_tokenizer: Callable[[], Any],
) -> list[Sequence[int]]:
    """Returns the token ids of each prompt, in whichever form they are given.

    Args:
        prompts: one text or several.
        input_ids: token ids of one prompt or of several, instead.
        get_tokenizer: returns what turns texts into tokens.

    Raises:
        ConfigurationError: if it is neither or both, or another type.
    """
    if prompts is None and input_ids is None:
        raise ConfigurationError("Must provide either prompts or input_ids.")
    if prompts is not None and input_ids is not None:
        raise ConfigurationError(
            "Cannot provide both prompts and input_ids; give one of them."
        )
    if prompts is not None:
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConfigurationError(
                    f"Prompt {index} of the batch is a {type(text).__name__}; "
                    f"prompts are strings, and token ids go to input_ids."
                )
        return list(get_tokenizer()(texts)["input_ids"]) if texts else []
    ids: Any = _plain(input_ids)
    if not isinstance(ids, (list, tuple)):
        raise ConfigurationError(
            f"input_ids is a {type(input_ids).__name__}; give the token ids of one "
            f"prompt as a list of integers, or a list of such lists."
        )
    if ids and isinstance(ids[0], int):
        return [ids]
    return [_plain(prompt) for prompt in ids]


def _plain(ids: Any) -> Any:
    """Returns what a tensor, an array or a scalar of NumPy holds, as Python's own."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


def prepare(
    prompts: Sequence[Sequence[int]],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    flags: Flags,
    capabilities: ServerCapabilities,
    *,
    return_exceptions: bool,
) -> Batch:
    """Returns the batch, checked before any of it can reach a server.

    Args:
        prompts: token ids of each prompt.
        sampling_params: one mapping for all, or one for each.
        flags: what else is asked for.
        capabilities: of the servers.
        return_exceptions: keep the error of a prompt in its place instead of raising
            the first one.

    Raises:
        ConfigurationError: if a prompt or a parameter is wrong.
        UnsupportedByServerError: for a parameter that the servers cannot honour.
    """
    size = len(prompts)
    params = _to_params(sampling_params, size)
    scored = _flags(flags.return_logprobs, size, "return_logprobs")
    prompts_scored = _flags(
        flags.return_prompt_logprobs, size, "return_prompt_logprobs"
    )
    tops = _for_each(flags.top_logprobs, size, "top_logprobs")
    sessions = _names(flags.session_ids, size, "session_ids")
    ids = _names(flags.request_ids, size, "request_ids")
    adapters = _for_each(flags.adapter, size, "adapter")
    mode = check_logprobs_mode(flags.logprobs_mode)
    batch = Batch(size=size, requests={}, errors={})
    checked: dict[int, dict[str, Any]] = {}
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        what = "The prompt" if return_exceptions else f"Prompt {index} of the batch"
        try:
            check_prompt(prompt, capabilities, what)
            # Most items of a batch share one mapping, which is checked once.
            if id(own) not in checked:
                checked[id(own)] = check_sampling_params(own, capabilities)
            check_top_log_probs(tops[index], capabilities)
        except SGLangError as error:
            if not return_exceptions:
                raise
            batch.errors[index] = error
            continue
        batch.requests[index] = GenerateRequest(
            input_ids=prompt,
            sampling_params=_with_seed(checked[id(own)], capabilities),
            return_log_probs=scored[index],
            return_prompt_log_probs=prompts_scored[index],
            top_log_probs=tops[index],
            request_id=ids[index],
            session_id=sessions[index],
            adapter=adapters[index],
            logprobs_mode=mode,
        )
    return batch


def check_sampling_keywords(names: Iterable[str], others: Iterable[str]) -> None:
    """Checks that keywords are sampling parameters.

    Args:
        names: the keywords.
        others: those that mean something else.

    Raises:
        ConfigurationError: with the nearest valid name.
    """
    valid = {"n", *SAMPLING_PARAMETERS, *SAMPLING_ALIASES}
    for name in names:
        if name not in valid:
            raise ConfigurationError(
                f"{name!r} is neither an argument of generate() nor a sampling "
                f"parameter.{hint(name, sorted(others))}"
            )


def merge_params(
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    keywords: Mapping[str, Any],
) -> Mapping[str, Any] | Sequence[Mapping[str, Any]] | None:
    """Returns sampling parameters with those that were given as keywords.

    Raises:
        ConfigurationError: if one is given both ways.
    """
    if not keywords:
        return sampling_params
    if isinstance(sampling_params, (list, tuple)):
        return [_merged(own, keywords) for own in sampling_params]
    return _merged(sampling_params or {}, keywords)


def _merged(own: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in check_mapping("sampling_params", own):
        if name in keywords:
            raise ConfigurationError(
                f"{name!r} is given in sampling_params and as a keyword; give one."
            )
    return {**own, **keywords}


def check_logprobs_mode(mode: Any) -> LogProbsMode:
    """Returns whose log-probabilities are asked for.

    Raises:
        ConfigurationError: if it is not one of the modes.
    """
    if mode in get_args(LogProbsMode):
        checked: LogProbsMode = mode
        return checked
    hints = {
        "raw_logprobs": " vLLM's 'raw_logprobs' is 'model' here.",
        "processed_logprobs": " vLLM's 'processed_logprobs' is nearest to 'sampling', "
        "which is not renormalised over what top-p and top-k keep.",
    }
    hint = hints.get(mode, "") if isinstance(mode, str) else ""
    raise ConfigurationError(
        f"logprobs_mode={mode!r} must be 'model' or 'sampling'.{hint}"
    )


def _with_seed(
    params: dict[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns the parameters with a seed, where the server would take one for all."""
    if not capabilities.uses_seeds or "sampling_seed" in params:
        return params
    return {**params, "sampling_seed": secrets.randbits(63)}


def _to_params(
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, size: int
) -> list[Mapping[str, Any]]:
    if sampling_params is None or isinstance(sampling_params, Mapping):
        return [sampling_params or {}] * size
    given = isinstance(sampling_params, (list, tuple))
    every: list[Any] = list(sampling_params) if given else [sampling_params]
    for own in every:
        if not isinstance(own, Mapping):
            raise ConfigurationError(
                f"sampling_params holds {own!r}, a {type(own).__name__}; give one "
                f"mapping of names to values, or a list of them."
            )
    if len(every) != size:
        raise ConfigurationError(
            f"{len(every)} sampling_params were given for {size} prompts; give one "
            f"mapping, or one for each prompt."
        )
    return every


def _flags(value: Any, size: int, name: str) -> list[bool]:
    return [check_flag(name, each) for each in _for_each(value, size, name)]


def _for_each(value: Any, size: int, name: str) -> list[Any]:
    """Returns what holds for each prompt, given for all of them or for each."""
    value = _plain(value)
    if not isinstance(value, (list, tuple)):
        return [value] * size
    if len(value) != size:
        raise ConfigurationError(
            f"{len(value)} values of {name} were given for {size} prompts; give one "
            f"for all, or one for each prompt."
        )
    return list(value)


def _names(value: Any, size: int, name: str) -> list[str | None]:
    names = _for_each(value, size, name)
    for each in names:
        # They travel in a header, which takes no line breaks and no other alphabets.
        if each is not None and not (
            isinstance(each, str) and each.isascii() and each.isprintable() and each
        ):
            raise ConfigurationError(
                f"{name} holds {each!r}; give printable ASCII strings."
            )
    return names

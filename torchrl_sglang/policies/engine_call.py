"""One batch of prompts to the engine and back: the middle step of the pipeline.

What the engine takes is asked of it as it is. What a server without a tokenizer cannot
do (stop strings, ``min_new_tokens``) is made up for here, with the decisions of
``stopping.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.policies.stopping import (
    Stages,
    as_texts,
    cut,
    join,
    without_tokenizer,
)
from torchrl_sglang.types import Completion, LogProbsMode

__all__ = ["Prompt", "ask"]

Outcome = Completion | SGLangError
"""What becomes of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the engine is asked for one sample."""

    token_ids: Sequence[int]
    """Tokens of the prompt, or of the sequence to score."""
    sampling_params: Mapping[str, Any]
    """How to continue it, under SGLang's names."""
    log_probs: bool = False
    """Whether the response's log-probabilities are asked for."""
    score: bool = False
    """Whether the prompt's own log-probabilities are asked for."""
    top_log_probs: int = 0
    """Number of the likeliest tokens to name in each response token's place."""
    include_stop: bool = True
    """Whether a response keeps the stop string that it ends with."""


def ask(
    engine: RLSGLangEngine,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Any,
    return_exceptions: bool = False,
    adapter: str | None = None,
    logprobs_mode: LogProbsMode = "model",
) -> list[Outcome]:
    """Returns a completion for each prompt.

    Args:
        engine: the engine.
        prompts: what is asked for.
        tokenizer: for what the server does not do; can be missing where nothing needs
            it.
        return_exceptions: put the error of an item in its place instead of raising
            the first one.
        adapter: LoRA adapter to compute them with; by default the engine's.
        logprobs_mode: whose log-probabilities of the responses.

    Raises:
        SGLangError: as :meth:`~torchrl_sglang.AsyncSGLang.generate` does.
        ConfigurationError: if a tokenizer is needed and there is none.
    """
    if engine.capabilities.has_tokenizer:
        for_cutting = [not prompt.include_stop for prompt in prompts]
        for prompt in prompts:
            if prompt.sampling_params.get("stop") and not prompt.include_stop:
                _needed(tokenizer, "stop")  # Before anything is generated.
        outcomes = _generate(engine, prompts, return_exceptions, adapter, logprobs_mode)
    else:
        outcomes = _generate_in_stages(
            engine, prompts, tokenizer, return_exceptions, adapter, logprobs_mode
        )
        for_cutting = [True] * len(prompts)
    for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        stops = as_texts(prompt.sampling_params.get("stop", ()))
        if stops and for_cutting[index] and isinstance(outcome, Completion):
            outcomes[index] = cut(
                outcome,
                stops,
                lambda ids: decode(_needed(tokenizer, "stop"), [ids])[0],
                include=prompt.include_stop,
            )
    return outcomes


def decode(
    tokenizer: Any, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Returns the text of each row of token ids, exactly as the tokens spell it."""
    texts: list[str] = tokenizer.batch_decode(
        rows,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return texts


def _generate(
    engine: RLSGLangEngine,
    prompts: Sequence[Prompt],
    return_exceptions: bool,
    adapter: str | None,
    logprobs_mode: LogProbsMode,
) -> list[Outcome]:
    return list(
        engine.generate(
            input_ids=[prompt.token_ids for prompt in prompts],
            sampling_params=[prompt.sampling_params for prompt in prompts],
            return_logprobs=[prompt.log_probs for prompt in prompts],
            return_prompt_logprobs=[prompt.score for prompt in prompts],
            top_logprobs=[prompt.top_log_probs for prompt in prompts],
            return_exceptions=return_exceptions,
            adapter=adapter,
            logprobs_mode=logprobs_mode,
        )
    )


def _needed(tokenizer: Any, name: str) -> Any:
    if tokenizer is None:
        raise ConfigurationError(
            f"{name!r} needs a tokenizer, and neither the server nor the wrapper has "
            f"one; pass tokenizer=..."
        )
    return tokenizer


def _generate_in_stages(
    engine: RLSGLangEngine,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    return_exceptions: bool,
    adapter: str | None,
    logprobs_mode: LogProbsMode,
) -> list[Outcome]:
    """Asks a server without a tokenizer; see :func:`.stopping.without_tokenizer`."""
    stages = _stages(engine, prompts, tokenizer)
    outcomes = _generate(
        engine,
        [
            replace(prompt, sampling_params=stage.first)
            for prompt, stage in zip(prompts, stages, strict=True)
        ],
        return_exceptions,
        adapter,
        logprobs_mode,
    )
    later = [
        index
        for index, (outcome, stage) in enumerate(zip(outcomes, stages, strict=True))
        if stage.second is not None
        and isinstance(outcome, Completion)
        and outcome.finish_reason == "length"
        and _has_room(engine, len(prompts[index].token_ids) + len(outcome.token_ids))
    ]
    if not later:
        return outcomes
    continued = _generate(
        engine,
        [_continued(prompts[i], outcomes[i], stages[i]) for i in later],
        return_exceptions=True,
        adapter=adapter,
        logprobs_mode=logprobs_mode,
    )
    for index, rest in zip(later, continued, strict=True):
        begun = outcomes[index]
        assert isinstance(begun, Completion)
        if isinstance(rest, Completion):
            outcomes[index] = join(begun, rest)
            continue
        # Not all of the batch was sent again, so its place is another one there.
        error = rest.replace(index=index) if hasattr(rest, "index") else rest
        if not return_exceptions:
            raise error.replace(note=f"It is item {index} of {len(prompts)}.")
        outcomes[index] = error
    return outcomes


def _stages(
    engine: RLSGLangEngine, prompts: Sequence[Prompt], tokenizer: Any
) -> list[Stages]:
    # Most prompts of a batch share one mapping, which is looked at once.
    known: dict[int, Stages] = {}
    for prompt in prompts:
        params = prompt.sampling_params
        if id(params) in known:
            continue
        for name in ("stop", "min_new_tokens"):
            if params.get(name):
                _needed(tokenizer, name)
        known[id(params)] = (
            Stages(first=params)
            if tokenizer is None or params.get("max_new_tokens") == 0
            else without_tokenizer(
                params,
                tokenizer=tokenizer,
                eos_token_ids=engine.capabilities.eos_token_ids,
            )
        )
    return [known[id(prompt.sampling_params)] for prompt in prompts]


def _has_room(engine: RLSGLangEngine, length: int) -> bool:
    limits = engine.capabilities
    return length <= min(limits.max_prompt, limits.max_context - 1)


def _continued(prompt: Prompt, begun: Outcome, stage: Stages) -> Prompt:
    assert isinstance(begun, Completion)
    assert stage.second is not None
    return replace(
        prompt,
        token_ids=[*prompt.token_ids, *begun.token_ids],
        sampling_params=stage.second,
        score=False,
    )

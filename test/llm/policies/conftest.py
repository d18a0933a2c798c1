"""The oracle of the wrapper: TorchRL's own ``vLLMWrapper``, answered by Hugging Face.

vLLM is not installed here. ``vLLMWrapper`` needs little of it: a class of parameters,
an engine with ``generate``, and the records that it answers with. Those stand here,
with a greedy Hugging Face model as the engine, so that ``vLLMWrapper``'s own code
builds its containers out of values that owe nothing to SGLang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import log_probs
from torchrl.modules.llm.policies import vllm_wrapper

Score = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A greedy continuation of one prompt."""

    tokens: list[int]
    """The response, the token that ended it included."""
    log_probs: list[float]
    """Log-probability of each token of prompt and response; 0.0 for the first."""


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model in float32 that remembers what it was asked."""

    score: Score
    """Log-probability of each token given those before it; 0.0 for the first."""
    greedy: Callable[[tuple[int, ...], int], Answer]
    """Continues a prompt by at most so many tokens."""
    tokenizer: Any
    """Its tokenizer."""


@pytest.fixture(scope="module")
def reference(tiny_model_path: str, tokenizer: Any) -> Reference:
    """The model behind the engine of ``vLLMWrapper``, and the oracle of every value."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    score = partial(log_probs.score, model.eval())

    @cache
    def greedy(prompt: tuple[int, ...], max_tokens: int) -> Answer:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        full = out[0].tolist()
        return Answer(tokens=full[len(prompt) :], log_probs=score(full).tolist())

    return Reference(score, greedy, tokenizer)


@dataclass
class SamplingParams:
    """vLLM's class of the same name, as far as ``vLLMWrapper`` fills it.

    Its two checks are vLLM's own, which are what refuses such arguments there.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    stop: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}."
                )


@dataclass
class Logprob:
    """vLLM's record of one token's log-probability."""

    logprob: float


@dataclass
class CompletionOutput:
    """vLLM's record of one response."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """vLLM's record of one prompt and its responses."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0


class LLM:
    """vLLM's synchronous engine, answered by Hugging Face.

    As vLLM's V1 engine, it leaves out the prompt's log-probabilities that
    ``vLLMWrapper`` requests by default when it generates.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def get_tokenizer(self) -> Any:
        return self._reference.tokenizer

    def generate(
        self, prompts: Sequence[Any], sampling_params: SamplingParams
    ) -> list[RequestOutput]:
        answers = []
        for index, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            ids = (
                self._reference.tokenizer.encode(prompt)
                if isinstance(prompt, str)
                else prompt["prompt_token_ids"]
            )
            answers.append(self._answer(str(index), text, ids, sampling_params))
        return answers

    def _answer(
        self, request: str, text: str | None, ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        answer = self._reference.greedy(tuple(ids), params.max_tokens)
        scores = [Logprob(value) for value in answer.log_probs]
        rows = [
            {token: score}
            for token, score in zip([*ids, *answer.tokens], scores, strict=True)
        ]
        # The wrapper's own default is 1, and a caller's wish is True.
        scored = params.prompt_logprobs is True or params.max_tokens == 1
        return RequestOutput(
            request,
            text,
            ids,
            [None, *rows[1 : len(ids)]] if scored else None,
            [
                CompletionOutput(
                    index,
                    "",
                    list(answer.tokens),
                    None,
                    None if params.logprobs is None else rows[len(ids) :],
                )
                for index in range(params.n)
            ],
        )


# How vLLMWrapper recognises the engine.
LLM.__module__ = "vllm.entrypoints.llm"


@pytest.fixture
def vllm_engine(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine for ``vLLMWrapper``, which finds a vLLM to import meanwhile."""
    package = ModuleType("vllm")
    package.outputs = ModuleType("vllm.outputs")
    package.outputs.CompletionOutput = CompletionOutput
    package.SamplingParams = SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.outputs", package.outputs)
    monkeypatch.setattr(vllm_wrapper, "_HAS_VLLM", True)
    monkeypatch.setattr(vllm_wrapper, "SamplingParams", SamplingParams)
    monkeypatch.setattr(vllm_wrapper, "RequestOutput", RequestOutput)
    monkeypatch.setattr(vllm_wrapper, "TokensPrompt", dict)
    # It keeps a class that it derives from vLLM's.
    monkeypatch.setattr(
        vllm_wrapper.vLLMWrapper, "_CompletionOutput_tc", None, raising=False
    )
    monkeypatch.delattr(vllm_wrapper.vLLMWrapper, "_CompletionOutput_tc")
    return LLM(reference)

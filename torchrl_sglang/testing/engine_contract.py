"""Contract tests for engines."""

from __future__ import annotations

import abc
import asyncio
import math

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.requests.request import GenerateRequest

LENGTH = 4
"""Tokens of a response."""


class EngineContract(abc.ABC):
    """Tests of an engine, for a subclass whose name pytest takes for tests.

    Examples:
        >>> class TestMine(EngineContract):
        ...     def engine(self):
        ...         return MyEngine()
    """

    @abc.abstractmethod
    def engine(self) -> RLSGLangEngine:
        """Returns a generating engine; it is not shut down here."""

    def test_responses_come_in_the_order_of_their_prompts(self) -> None:
        """Each has as many log-probs as tokens, none of them positive."""
        engine = self.engine()
        prompts = [[5, 6, 7], [5], [6, 5, 6, 5]]
        completions = engine.generate_requests([_request(ids) for ids in prompts])
        assert len(completions) == len(prompts)
        for completion in completions:
            assert len(completion.token_ids) == LENGTH
            assert completion.log_probs is not None
            assert len(completion.log_probs) == LENGTH
            assert all(value <= 0 for value in completion.log_probs)
            assert completion.finish_reason == "length"
            vocabulary = engine.capabilities.vocab_size
            assert all(0 <= token < vocabulary for token in completion.token_ids)
            ends = [span.end for span in completion.versions]
            assert ends[-1:] in ([], [LENGTH])

    def test_prompts_are_scored(self) -> None:
        """The first token has no log-prob, as nothing comes before it."""
        request = GenerateRequest(
            input_ids=[5, 6, 7, 8],
            sampling_params={"max_new_tokens": 0},
            return_prompt_logprobs=True,
        )
        (completion,) = self.engine().generate_requests([request])
        assert completion.prompt_log_probs is not None
        assert len(completion.prompt_log_probs) == 4
        assert math.isnan(completion.prompt_log_probs[0])
        assert all(value <= 0 for value in completion.prompt_log_probs[1:])

    def test_an_error_is_in_the_place_of_its_request(self) -> None:
        """The others are answered."""
        engine = self.engine()
        wrong = _request([engine.capabilities.vocab_size])
        requests = [_request([5]), wrong, _request([6])]
        outcomes = engine.generate_requests(requests, return_exceptions=True)
        assert isinstance(outcomes[1], ConfigurationError)
        assert len(outcomes[0].token_ids) == len(outcomes[2].token_ids) == LENGTH
        try:
            engine.generate_requests(requests)
        except ConfigurationError:
            return
        raise AssertionError("A wrong prompt must raise ConfigurationError.")

    def test_calls_can_be_awaited(self) -> None:
        """From an event loop of the caller's own."""
        engine = self.engine()
        (completion,) = asyncio.run(engine.agenerate_requests([_request([5])]))
        assert len(completion.token_ids) == LENGTH

    def test_it_says_what_it_serves(self) -> None:
        """The versions of weights are texts, and limits are positive."""
        engine = self.engine()
        assert isinstance(engine.weight_version, str)
        assert isinstance(engine.newest_version, str)
        assert engine.capabilities.max_context > engine.capabilities.max_prompt > 0
        tokenizer = engine.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("a", add_special_tokens=False))


def _request(input_ids: list[int]) -> GenerateRequest:
    return GenerateRequest(
        input_ids=input_ids,
        sampling_params={"max_new_tokens": LENGTH, "ignore_eos": True},
        return_logprobs=True,
    )

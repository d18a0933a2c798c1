"""Single turns of conversations, without TensorDicts until they are complete.

An :class:`SGLangWrapper <torchrl_sglang.SGLangWrapper>` reads and writes batches of
TensorDicts; a collector that runs many conversations side by side handles one turn at a
time. :class:`TurnCodec` does what the wrapper does, with the wrapper's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import NestedKey, TensorDict

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies import outputs
from torchrl_sglang.policies.chat import continue_tokens, render
from torchrl_sglang.policies.engine_call import ask_async
from torchrl_sglang.policies.inputs import Prompts
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.types import Completion

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and the history's other fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A conversation as the model reads it."""

    text: str
    """With the chat template, up to the assistant's turn."""
    token_ids: list[int]
    """Its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A response of the policy."""

    completion: Completion
    """Its tokens, log-probs and versions."""
    text: str
    """Its text."""
    message: str
    """Its text without the token that ends a turn."""
    ended: bool
    """Whether its last token ends a turn."""


class TurnCodec:
    """Encodes, requests and decodes single turns as a wrapper does with batches.

    Args:
        policy: whose settings apply.
        tools: JSON schemas of the tools that the chat template tells the model of.
    """

    def __init__(
        self, policy: SGLangWrapper, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        _check_settings(check_policy(policy), {"input_mode": "history"})
        self._policy = policy
        self._tools = tools
        self._params = policy.sampling_params
        self._ends = policy.end_tokens(self._params)
        self._keys = policy.key_by_container(self._params)
        self._request = policy.make_request(self._params)

    def encode(
        self, messages: Sequence[Message], known: list[int] | None = None
    ) -> EncodedPrompt:
        """Applies the chat template; with ``prefer_tokens`` it reuses known tokens."""
        tokenizer = self._policy.tokenizer
        text = self._render(messages, self._tools)
        if not self._policy.prefer_tokens:
            known = None
        (ids,) = continue_tokens(
            [text],
            None if known is None else [known],
            tokenizer,
            self._policy.padding_value,
        )
        return EncodedPrompt(text=text, token_ids=ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        (text,) = render(
            [messages],
            tokenizer=self._policy.tokenizer,
            template=self._policy.template,
            add_generation_prompt=True,
            tools=tools,
        )
        return text

    def tells_of_tools(self) -> bool:
        """Returns whether the chat template tells the model of its tools."""
        messages = [{"role": "user", "content": "?"}]
        return self._render(messages, self._tools) != self._render(messages, ())

    @property
    def longest(self) -> int:
        """Most tokens of a prompt that leaves room for a response."""
        limits = self._policy.model.capabilities
        return min(limits.max_prompt, limits.max_context - 1)

    def fits(self, prompt: EncodedPrompt) -> bool:
        """Returns whether a prompt leaves room for a response."""
        return len(prompt.token_ids) <= self.longest

    async def respond(
        self,
        prompt: EncodedPrompt,
        *,
        sample: int = 0,
        session_id: str | None = None,
        timeout: float,
    ) -> Response:
        """Returns the policy's response; each sample of a group has its own seed."""
        request = replace(
            self._request,
            input_ids=prompt.token_ids,
            sampling_params=self._params.for_sample(sample),
            session_id=session_id,
        )
        policy = self._policy
        (completion,) = await ask_async(
            policy.model, [request], tokenizer=policy.tokenizer, timeout=timeout
        )
        assert isinstance(completion, Completion)
        ids = completion.token_ids
        ended = bool(ids) and ids[-1] in self._ends
        ((text, message),) = outputs.read_texts(
            [completion],
            [ended],
            tokenizer=policy.tokenizer,
            skip_special_tokens=self._params.skip_special_tokens,
        )
        return Response(completion=completion, text=text, message=message, ended=ended)

    @property
    def columns(self) -> frozenset[str]:
        """Top-level keys of :meth:`containers`."""
        keys = self._keys.values()
        return frozenset(key if isinstance(key, str) else key[0] for key in keys)

    def containers(
        self,
        turns: Sequence[tuple[EncodedPrompt, Response, Sequence[TensorDict]]],
    ) -> list[dict[NestedKey, Any]]:
        """Returns TorchRL's containers of each turn: prompt, response, messages."""
        completions = [response.completion for _, response, _ in turns]
        prompts = Prompts(
            token_ids=[prompt.token_ids for prompt, _, _ in turns],
            texts=[prompt.text for prompt, _, _ in turns],
        )
        policy = self._policy
        samples = outputs.generated(
            prompts, completions, log_probs=policy.return_log_probs
        )
        if "generation_info" in self._keys:
            ended = [response.ended for _, response, _ in turns]
            outputs.add_info(samples, completions, ended, self._params.top_logprobs)
        outputs.add_columns(samples, prompts, completions, policy.token_layouts)
        texts = [(response.text, response.message) for _, response, _ in turns]
        outputs.add_text(samples, prompts, texts)
        for sample, (_, _, messages) in zip(samples, turns, strict=True):
            sample["history"] = {
                "prompt": outputs.to_history(messages[:-1]),
                "response": outputs.to_history(messages[-1:]),
                "full": outputs.to_history(messages),
            }
        return [
            {
                self._keys[name]: value
                for name, value in outputs.assemble(
                    [sample], (), pad_output=False, padding_value=0, device=None
                ).items()
            }
            for sample in samples
        ]


def check_policy(policy: Any) -> SGLangWrapper:
    """Returns a wrapper that generates one ragged sample for each prompt; or raises."""
    if not isinstance(policy, SGLangWrapper):
        raise ConfigurationError(
            f"policy must be an SGLangWrapper, got {type(policy).__name__}."
        )
    _check_settings(
        policy,
        {"generate": True, "num_samples": None, "pad_output": False, "batching": False},
    )
    return policy


def _check_settings(policy: SGLangWrapper, wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if getattr(policy, name) != value:
            raise ConfigurationError(
                f"An asynchronous collector needs a policy with {name}={value!r}, got "
                f"{getattr(policy, name)!r}; write policy.get_new_version({name}="
                f"{value!r})."
            )

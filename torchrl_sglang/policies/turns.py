"""Single turns of conversations, without TensorDicts until they are complete.

An :class:`SGLangWrapper <torchrl_sglang.SGLangWrapper>` reads and writes batches of
TensorDicts; a collector that runs many conversations side by side handles one turn at a
time. :class:`TurnCodec` does the wrapper's work, with the wrapper's settings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import NestedKey, TensorDict

from torchrl_sglang.chat import rendered
from torchrl_sglang.chat.messages import Message, check_last_message, read_messages
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies import outputs
from torchrl_sglang.policies.engine_call import ask_async
from torchrl_sglang.policies.inputs import PromptBatch
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.support.checks import to_python
from torchrl_sglang.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A conversation as the model reads it."""

    text: str
    """Text of the conversation with the chat template, up to the assistant's turn."""
    token_ids: list[int]
    """Tokens of the conversation."""
    num_messages: int
    """Number of its messages."""


@dataclass(kw_only=True, eq=False, slots=True)
class ConversationTurn:
    """One response of the policy, and its prompt."""

    prompt: EncodedPrompt
    """Conversation that the model read."""
    completion: Completion
    """Tokens, log-probs and weight versions of the response."""
    text: str
    """Text of the response, with the token that ends a turn."""
    message: str
    """Text of the response without the end of the turn that the template writes."""
    is_complete: bool
    """Whether the last token ends a turn."""
    policy_version: int
    """Policy version when the prompt was sent."""
    reward: float = 0.0
    """Reward of this turn. Functions may change it."""
    start: float
    """Time at which the prompt was sent, in seconds since the epoch."""
    end: float
    """Time at which the response was complete."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the response."""
        return self.completion.token_ids


class TurnCodec:
    """Encodes, requests and decodes single turns as a wrapper does with batches."""

    def __init__(
        self, policy: SGLangWrapper, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        _check_settings(check_policy(policy), {"input_mode": "history"})
        self._policy = policy
        self._setting = PromptSettings(tools=tools)
        self._params = policy.sampling_params
        self._ends = policy.end_tokens(self._params)
        self._keys = policy.key_by_container(self._params)
        self._request = policy.make_request(self._params)

    def encode(
        self,
        messages: Sequence[Message],
        earlier: ConversationTurn | None = None,
    ) -> EncodedPrompt:
        """Applies the chat template.

        With ``prefer_tokens`` it goes on from the tokens of an earlier prompt and the
        response to it, if the conversation does.
        """
        # Functions may have changed them.
        messages = read_messages(messages, "The conversation")
        check_last_message(messages)
        if earlier is not None and self._policy.prefer_tokens:
            joined = self._extend(earlier, messages)
            if joined is not None:
                return joined
        template = self._policy.template
        text = template.render(messages, self._setting)
        return EncodedPrompt(
            text=text, token_ids=template.encode(text), num_messages=len(messages)
        )

    def _extend(
        self, turn: ConversationTurn, messages: Sequence[Message]
    ) -> EncodedPrompt | None:
        """Returns a prompt that goes on from a response, if the template allows it."""
        prompt, completion = turn.prompt, turn.completion
        count = prompt.num_messages
        earlier, replies, later = (
            messages[:count],
            messages[count : count + 1],
            messages[count + 1 :],
        )
        # A function may have edited it, or given it further fields.
        texts = [(reply.get("role"), reply.get("content")) for reply in replies]
        if texts != [("assistant", turn.message)]:
            return None
        template = self._policy.template
        reply = rendered.ChatResponse(
            message=replies[0],
            text=turn.message,
            end=template.decode(turn.token_ids[-1:]) if turn.is_complete else None,
        )
        extension = template.extend(prompt.text, earlier, reply, later, self._setting)
        if extension is None:
            return None
        return EncodedPrompt(
            text=extension.rendered,
            token_ids=[*prompt.token_ids, *completion.token_ids, *extension.token_ids],
            num_messages=len(messages),
        )

    def renders_tools(self) -> bool:
        """Returns whether the chat template renders the tools."""
        messages = [{"role": "user", "content": "?"}]
        render = self._policy.template.render
        return render(messages, self._setting) != render(messages)

    @property
    def takes_any_id(self) -> bool:
        """Whether the chat template takes any id of a call, not only short ones."""
        return not self._policy.template.call_form.short_ids

    @property
    def longest(self) -> int:
        """Most tokens of a prompt that leaves room for a response."""
        return self._policy.model.capabilities.longest_prompt

    def fits(self, prompt: EncodedPrompt) -> bool:
        """Returns whether a prompt leaves room for a response."""
        return len(prompt.token_ids) <= self.longest

    async def respond(
        self,
        prompt: EncodedPrompt,
        *,
        sample: int = 0,
        seed: int | None = None,
        session_id: str | None = None,
        priority: int | None = None,
        policy_version: int,
        timeout: float,
    ) -> ConversationTurn:
        """Returns the policy's response; each sample of a group has its own seed."""
        start, params = time.time(), self._params.for_sample(sample)
        if seed is not None:
            params = {**params, "sampling_seed": to_python(seed)}
        request = replace(
            self._request,
            input_ids=prompt.token_ids,
            sampling_params=params,
            session_id=session_id,
            priority=priority,
        )
        policy = self._policy
        (completion,) = await ask_async(
            policy.model, [request], tokenizer=policy.tokenizer, timeout=timeout
        )
        assert isinstance(completion, Completion)
        ids = completion.token_ids
        ((text, message),) = outputs.read_texts(
            [completion],
            [self._ends.drop_last(ids)],
            tokenizer=policy.tokenizer,
            skip_special_tokens=self._params.skip_special_tokens,
        )
        return ConversationTurn(
            prompt=prompt,
            completion=completion,
            text=text,
            message=message,
            is_complete=self._ends.have_ended(ids),
            policy_version=policy_version,
            start=start,
            end=time.time(),
        )

    @property
    def columns(self) -> frozenset[str]:
        """Top-level keys of :meth:`containers`."""
        keys = self._keys.values()
        return frozenset(key if isinstance(key, str) else key[0] for key in keys)

    def containers(
        self,
        turns: Sequence[tuple[ConversationTurn, Sequence[TensorDict]]],
    ) -> list[dict[NestedKey, Any]]:
        """Returns TorchRL's containers of each turn: prompt, response, messages."""
        prompts = PromptBatch(
            token_ids=[turn.prompt.token_ids for turn, _ in turns],
            texts=[turn.prompt.text for turn, _ in turns],
        )
        turn_ends = [turn.is_complete for turn, _ in turns]
        samples = outputs.generated(
            prompts,
            [turn.completion for turn, _ in turns],
            log_probs=self._policy.return_log_probs,
            layouts=self._policy.token_layouts,
            texts=[(turn.text, turn.message) for turn, _ in turns],
            ended=turn_ends if "generation_info" in self._keys else None,
            top_logprobs=self._params.top_logprobs,
        )
        for sample, (_, messages) in zip(samples, turns, strict=True):
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

"""Responses of the policy, parsed into text, reasoning and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.call_grammars import CALL_FORMATS
from torchrl_sglang.chat.messages import Message, without_stop
from torchrl_sglang.chat.pieces import shared_ids
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.chat.tool_calls import REASONING_MARKS, read_calls
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    ServerError,
    SGLangError,
)
from torchrl_sglang.gateway.drafts import Detokenizer, Draft, DraftReader
from torchrl_sglang.gateway.progress import Follower, Progress
from torchrl_sglang.gateway.turns import Prompt
from torchrl_sglang.policies.engine_call import (
    EndTokens,
    SampleRequest,
    ask_async,
    turn_end_tokens,
)
from torchrl_sglang.requests.seeds import with_sample_seed
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.checks import nearest
from torchrl_sglang.support.event_loop import run_async
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion, LogProbsMode

_CALLS_PATH, _REASONING_PATH = "/parse_function_call", "/separate_reasoning"
"""Routes of the servers' parsers."""

_NOT_NOW = frozenset({None, 408, 429, 502, 503, 504})
"""Statuses of a response, inconclusive about a parser; None: no response."""

ATTEMPTS = 2
"""Attempts to query a parser: connections break."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of responses."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters under SGLang's names."""
    number: int = 1
    """Number of responses to a prompt."""
    top_logprobs: int = 0
    """Return the top-k tokens of each position, for this k."""
    prompt_logprobs: bool = False
    """Return the log-probs of the prompt's tokens."""
    adapter: str | None = None
    """LoRA adapter; ``None`` for the engine's default."""
    priority: int | None = None
    """Priority in a server's queue; ``None`` for the session's."""
    decodes: bool = True
    """Return the text of the responses."""
    keeps_aborted: bool = False
    """Return the tokens of an aborted response instead of an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReply:
    """A response."""

    completion: Completion
    """Tokens of the response."""
    text: str
    """Text of the response, without the end of turn from the template."""
    message: Message
    """The response as a message."""
    ended: bool
    """Whether the last token ends a turn."""


class PromptTooLongError(ConfigurationError):
    """A conversation without room for a response."""

    tokens: int
    """Tokens of the conversation."""
    longest: int
    """Its most tokens."""


@dataclass(kw_only=True, eq=False)
class Policy:
    """Generates responses to conversations with an engine."""

    engine: RLSGLangEngine
    """The engine."""
    tokenizer: Any
    """Tokenizer of its model."""
    template: ChatTemplate
    """Chat template of conversations."""
    tool_call_parser: str | None
    """SGLang's name of the format of tool calls."""
    reasoning_parser: str | None
    """SGLang's name of the format of reasoning."""
    token_columns: Sequence[TokenColumn]
    """Recorded columns of each token."""
    logprobs_mode: LogProbsMode
    """Distribution of the recorded log-probs."""
    timeout: float
    """Timeout of a response, in seconds."""

    async def check_parsers(self) -> None:
        """Checks the servers' parsers, if they respond."""
        name, parser = "tool_call_parser", self.tool_call_parser
        await self._check_parser(_CALLS_PATH, name, parser, CALL_FORMATS, tools=[])
        name, parser = "reasoning_parser", self.reasoning_parser
        await self._check_parser(_REASONING_PATH, name, parser, REASONING_MARKS)

    async def _check_parser(
        self, path: str, name: str, given: str | None, known: Iterable[str], **more: Any
    ) -> None:
        if given is None:
            return
        content = {"text": "", name: given, **more}
        for _ in range(ATTEMPTS):
            try:
                await self.engine.control.parse_response(path, content)
            except ServerError as error:
                if getattr(error, "status", None) in _NOT_NOW:
                    continue
                guess = nearest(str(given), known)
                raise ConfigurationError(
                    f"{name}={given!r}: the servers fail with it, and all responses "
                    f"would stay text; give SGLang's name of the model's format."
                    + (f" Did you mean {guess!r}?" if guess else "")
                    + f" ({error})"
                ) from error
            return

    def check_fits(self, prompt: Prompt) -> None:
        """Raises :class:`ConfigurationError` if there is no room for a response."""
        longest = self.engine.capabilities.longest_prompt
        if prompt.num_tokens > longest:
            # Clients search for OpenAI's words, and some for its code in the text.
            raise PromptTooLongError(
                f"This model's maximum context length is {longest} tokens. However, "
                f"your messages resulted in {prompt.num_tokens} tokens. Please reduce "
                f"the length of the messages. (context_length_exceeded)",
                tokens=prompt.num_tokens,
                longest=longest,
            )

    async def respond(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        session: str | None,
        request_id: str | None = None,
        priority: int | None = None,
        progress: Progress | None = None,
    ) -> list[PolicyReply]:
        """Returns responses to a conversation, all from the session's server."""
        request = SampleRequest(
            input_ids=list(prompt.token_ids),
            sampling_params=sampling.params,
            return_logprobs=True,
            return_prompt_logprobs=sampling.prompt_logprobs,
            top_logprobs=sampling.top_logprobs,
            adapter=sampling.adapter,
            request_id=request_id,
            session_id=session,
            priority=priority if sampling.priority is None else sampling.priority,
            token_columns=self.token_columns,
            logprobs_mode=self.logprobs_mode,
        )
        requests = [request]
        for index in range(1, sampling.number):
            params = with_sample_seed(sampling.params, index)
            requests.append(replace(request, sampling_params=params))
        followed: list[asyncio.Task[None]] = []
        if progress is not None:
            progress.begin(prompt.num_tokens)
            followers = [
                self._follow(prompt, sampling, partial(progress.tell, number))
                for number in range(len(requests))
            ]
            requests = [
                replace(request, on_tokens=follower.on_tokens)
                for request, follower in zip(requests, followers, strict=True)
            ]
            followed = [asyncio.ensure_future(follower.run()) for follower in followers]
        try:
            outcomes = await ask_async(
                self.engine,
                requests,
                tokenizer=self.tokenizer,
                timeout=self.timeout,
                return_exceptions=sampling.keeps_aborted,
            )
        finally:
            await _end(followed)
        ends = self._ends(sampling)
        completions = []
        for outcome in outcomes:
            if isinstance(outcome, GenerationAbortedError) and outcome.partial:
                completions.append(outcome.partial)
            elif isinstance(outcome, SGLangError):
                raise outcome
            else:
                completions.append(outcome)
        read = partial(self._read, prompt=prompt, ends=ends, decodes=sampling.decodes)
        if len(completions) == 1:
            return [await read(completions[0])]
        return await asyncio.gather(*map(read, completions))

    def _ends(self, sampling: Sampling) -> EndTokens:
        return turn_end_tokens(
            sampling.params,
            eos_token_ids=self.engine.capabilities.eos_token_ids,
            tokenizer=self.tokenizer,
            template=self.template,
        )

    def _follow(
        self, prompt: Prompt, sampling: Sampling, tell: Callable[[Draft], None]
    ) -> Follower:
        """Returns a reader of a response during its generation."""
        is_chat = prompt.new_text is None
        parses = is_chat and self.reasoning_parser is not None
        may_call = is_chat and bool(prompt.setting.tools)

        def begin() -> tuple[DraftReader, Set[int]]:
            stops = sampling.params.get("stop") or ()
            reader = DraftReader(
                self._separate if parses else None,
                reasoning_parser=self.reasoning_parser,
                call_parser=self.tool_call_parser if may_call else None,
                stops=[stops] if isinstance(stops, str) else stops,
            )
            return reader, self._ends(sampling).dropped

        template = self.template
        return Follower(begin, Detokenizer(template.decode, template.byte_tokens), tell)

    async def _separate(self, text: str) -> tuple[str, str]:
        """Returns reasoning and content, from SGLang's parser."""
        parts = await self._ask(
            _REASONING_PATH, text=text, reasoning_parser=self.reasoning_parser
        )
        content = parts.get("text") if parts else text
        return parts.get("reasoning_text") or "", content or ""

    async def _read(
        self,
        completion: Completion,
        prompt: Prompt,
        ends: EndTokens,
        *,
        decodes: bool,
    ) -> PolicyReply:
        ids, text = completion.token_ids, ""
        if decodes:
            text = self.template.decode(ids[:-1] if ends.drop_last(ids) else ids)
            # Turns are kept for a long time.
            completion = replace(completion, token_ids=list(shared_ids(ids)))
        content = without_stop(text, completion.matched_stop)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if prompt.new_text is None:
            message |= await self._parse(content, prompt.setting.tools)
        return PolicyReply(
            completion=completion,
            text=text,
            message=message,
            ended=ends.have_ended(ids),
        )

    async def _parse(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Returns content, reasoning and tool calls, from SGLang's parsers.

        Unparsable text is content.
        """
        message: dict[str, Any] = {"content": text}
        if self.reasoning_parser is not None and text:
            reasoning, content = await self._separate(text)
            if reasoning:
                message["reasoning_content"] = reasoning
                # Templates put empty lines between them.
                message["content"] = content.lstrip("\n")
        if self.tool_call_parser is not None and tools and message["content"]:
            parts = await self._ask(
                _CALLS_PATH,
                text=message["content"],
                tools=[dict(tool) for tool in tools],
                tool_call_parser=self.tool_call_parser,
            )
            calls = read_calls(parts.get("calls") or (), text)
            if calls:
                message["tool_calls"] = calls
                message["content"] = parts.get("normal_text") or ""
        return message

    async def _ask(self, path: str, **content: Any) -> dict[str, Any]:
        """Returns the result of a servers' parser; empty if it fails."""
        parse = self.engine.control.parse_response(path, content)
        try:
            return await run_async(parse)
        except ServerError as error:
            # A parser can fail on any text of a model.
            torchrl_logger.warning(
                f"{path} failed on a response, which stays text: {error}"
            )
            return {}


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Ends followers of responses; their errors do not affect the responses."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            torchrl_logger.warning(f"A response could not be streamed: {outcome!r}")

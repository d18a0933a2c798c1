"""SGLangWrapper: an SGLang engine as a TorchRL policy, TensorDict in, TensorDict out.

One call of :meth:`SGLangWrapper.forward` passes through three modules::

    TensorDict -- inputs.py ------> token ids    (chat/ applies chat templates)
               -- engine_call.py -> completions  (batching.py gathers several threads)
               -- outputs.py -----> TensorDict

Every mode exchanges token ids with the engine and decodes text from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
    set_list_to_stack,
)
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.choose import choose_template
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies import outputs
from torchrl_sglang.policies.arguments import (
    Inplace,
    InputMode,
    check_batching,
    check_column_keys,
    check_mode,
    check_samples,
    check_sampling,
    check_token_columns,
    check_tokenizer_kwargs,
)
from torchrl_sglang.policies.batching import Batcher
from torchrl_sglang.policies.engine_call import (
    EndTokens,
    SampleRequest,
    ask,
    turn_end_tokens,
)
from torchrl_sglang.policies.inputs import (
    PromptBatch,
    read_history,
    read_text,
    read_tokens,
)
from torchrl_sglang.policies.sampling import SamplingParams, check_numbers, translate
from torchrl_sglang.requests.request import check_logprobs_mode
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.checks import check_flag
from torchrl_sglang.support.garbage import collect_garbage_afterwards
from torchrl_sglang.types import Completion, LogProbsMode, TokenLayout


class SGLangWrapper(LLMWrapperBase):
    """Generates or scores TensorDicts with an SGLang engine.

    A drop-in replacement for :class:`~torchrl.modules.llm.vLLMWrapper` with the same
    arguments, keys and containers. The tokenizer that is passed in is never modified.

    With ``generate=True`` it reads ``(input_mode, "prompt")`` and writes prompt,
    response and both together; with ``generate=False`` it reads ``(input_mode,
    "full")`` and writes the log-prob of each token.

    ===========  ======================================================
    input_mode   out_keys, in this order
    ===========  ======================================================
    history      text, masks, tokens, log_probs, history
    text         text, masks, tokens, log_probs
    tokens       masks, tokens, log_probs
    ===========  ======================================================

    Log-probs are the model's own, ``log_softmax(logits)``, as TorchRL's losses compute
    them from the trained model, so that importance ratios start at 1;
    ``logprobs_mode`` changes that for sampled tokens. The first token of a scored
    sequence gets 0.0.

    Args:
        model (RLSGLangEngine or str): an engine, the URL of a running server, or the
            name of a model to start a server for.

    Keyword Args:
        tokenizer (tokenizer or str, optional): defaults to the engine's.
        input_mode (str): ``"history"`` (default), ``"text"`` or ``"tokens"``.
        input_key (NestedKey, optional): key to read instead of the default.
        attention_mask_key (NestedKey): key of an optional attention mask of the input,
            in tokens mode, of the tokens' shape, with True or 1 for each token that
            counts; one that does not fit is refused. Defaults to
            ``"attention_mask"``.
        generate (bool): generate (default) or score. A ``History`` has no declarations
            of tools and is rendered without them: score a conversation that was
            generated with tools by its tokens, ``input_mode="tokens"``.
        generate_kwargs (dict, optional): sampling parameters, under TorchRL's standard
            names, vLLM's or SGLang's. Types and ranges are checked at once.
            ``max_new_tokens`` defaults to 16, as in vLLM; ``None`` allows what fits
            into the context, with a warning at the first response with less room than
            it asks for. ``prompt_logprobs=True`` also returns the prompt's log-probs.
            ``logprobs=N`` writes the top ``N`` tokens at each position to
            ``generation_info_key``.
            ``include_stop_str_in_output=False`` removes the stop string from the
            response, its tokens and its log-probs.
        tokenizer_kwargs (dict, optional): for tokenizing, in text mode.
        pad_output (bool): return rectangular tensors: prompts padded on the left,
            responses on the right. Defaults to False: ragged values, to be read with
            ``get(key, as_list=True)``.
        pad_model_input: must be None; inputs of the engine are never padded.
        inplace (bool or ``"empty"``, optional): write to the input (True, the default
            for one sample), to a new TensorDict (False), or to an empty one like the
            input (``"empty"``). With several samples it must be False.
        device (torch.device, optional): device of the results. Defaults to the input's.
        layout (torch.layout, optional): for compatibility with TorchRL;
            ``torch.strided`` when not padding.
        num_samples (int, optional): samples per prompt; adds a dimension of this size
            after the batch dimensions. Also ``generate_kwargs["n"]`` if greater than 1.
        chat_template_name (str, optional): one of TorchRL's chat templates. Defaults
            to TorchRL's for models of this name, otherwise the tokenizer's own.
        chat_template (str, optional): a chat template; overrides the name.
        chat_template_kwargs (dict, optional): variables of the chat template, such as
            ``{"enable_thinking": False}``. Those that it does not have are refused.
        return_log_probs (bool, optional): defaults to True; must not be False when
            scoring.
        history_key (NestedKey): where to write the conversations. Defaults to
            ``"history"``.
        text_key (NestedKey): where to write the texts. Defaults to ``"text"``.
        tokens_key (NestedKey): where to write the token ids. Defaults to ``"tokens"``.
        masks_key (NestedKey): where to write the attention and assistant masks.
            Defaults to ``"masks"``.
        log_probs_key (NestedKey): where to write the log-probs. Defaults to
            ``"log_probs"``.
        batching (bool, optional): batch the calls of several threads, although SGLang
            runs concurrent calls together anyway. Also enabled by either size.
        min_batch_size (int, optional): number of prompts to wait for. Defaults to 1.
        max_batch_size (int, optional): maximum prompts per batch. A larger call is
            split into consecutive batches, of which only the first waits for others.
        batching_timeout (float): longest wait of a call, in seconds. Defaults to 10.
        prefer_tokens (bool): in history mode, reuse the tokens under ``tokens_key``
            (``"full"`` of the last turn, or ``"prompt"``) and tokenize only the rest of
            the conversation, so that the model sees exactly the tokens it generated.
            Tokens that do not match the conversation's beginning are ignored. Defaults
            to False.
        return_generation_info (bool): also write a
            :class:`~torchrl_sglang.GenerationInfo`: finish reason, cached prompt
            tokens, and the weight version of each token. Defaults to False.
        generation_info_key (NestedKey): where to write it.
        adapter (str, optional): name of the LoRA adapter to generate and score with;
            ``""`` selects the base model. Defaults to the engine's default adapter,
            which weight updates with ``transport="lora"`` set.
        logprobs_mode (str): which log-probs to write for sampled tokens and top tokens:
            ``"model"`` (default), the model's own; ``"sampling"``, those of the
            sampling distribution before top-k, top-p and min-p; or ``"behaviour"``,
            those of the distribution that drew the tokens. It writes the token
            columns ``"sampling_support"`` and ``"sampling_temperature"``, too; with
            ``top_p`` or ``min_p`` it needs a ``top_k``. See
            :meth:`.AsyncSGLang.generate`.
            ``GenerationInfo.logprobs_mode`` records which.
        token_columns (sequence, optional): further quantities that the servers report
            for each token: names that :class:`~torchrl_sglang.TokenColumn` lists, or
            rows of your own. Each is written under its name, with the fields
            ``"response"`` and ``"full"`` like the tokens. Those of lists hold the lists
            one after the other, and ``"response_counts"`` and ``"full_counts"`` their
            lengths. Defaults to none.

    Raises:
        ConfigurationError: (a ValueError) if an argument is invalid or unsupported.
        UnsupportedByServerError: if the servers were started without what a sampling
            parameter needs, such as a grammar backend.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> policy = SGLangWrapper(
        ...     engine, generate_kwargs={"max_new_tokens": 4, "ignore_eos": True}
        ... )
        >>> chats = [[{"role": "user", "content": "Hi"}]]
        >>> prompt = History.from_chats(chats)
        >>> td = policy(TensorDict(history=ChatHistory(prompt=prompt), batch_size=1))
        >>> td["history"].full.content[0][0]
        'Hi'
        >>> [row.shape for row in td.get(("log_probs", "response"), as_list=True)]
        [torch.Size([4])]
    """

    def __init__(
        self,
        model: RLSGLangEngine | str,
        *,
        tokenizer: Any | str | None = None,
        input_mode: InputMode = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: Inplace | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        history_key: NestedKey = "history",
        text_key: NestedKey = "text",
        tokens_key: NestedKey = "tokens",
        masks_key: NestedKey = "masks",
        log_probs_key: NestedKey = "log_probs",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
        return_generation_info: bool = False,
        generation_info_key: NestedKey = "generation_info",
        adapter: str | None = None,
        logprobs_mode: LogProbsMode = "model",
        token_columns: Sequence[str | TokenColumn] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # get_new_version starts from these; locals() holds the arguments and self.
        arguments = {**locals()}
        super().__init__()
        for name in ("self", "__class__"):
            arguments.pop(name, None)
        self._arguments = arguments
        check_mode(
            input_mode,
            generate=generate,
            pad_model_input=pad_model_input,
            return_log_probs=return_log_probs,
            return_generation_info=return_generation_info,
        )
        self.logprobs_mode = check_logprobs_mode(logprobs_mode)
        self.token_columns = check_token_columns(
            token_columns, generate=generate, mode=self.logprobs_mode
        )
        self.input_mode = input_mode
        self.generate = generate
        self.pad_output = check_flag("pad_output", pad_output)
        self.prefer_tokens = check_flag("prefer_tokens", prefer_tokens)
        self.return_generation_info = return_generation_info
        self.return_log_probs = return_log_probs is None or bool(return_log_probs)
        self.return_history = input_mode == "history"
        self.return_text = input_mode != "tokens"
        self.return_tokens = self.return_masks = True
        self.adapter = adapter
        self._device = None if device is None else torch.device(device)
        self.layout = torch.strided if not pad_output and layout is None else layout
        self.chat_template_name = chat_template_name
        self.chat_template = chat_template
        self.attention_mask_key = attention_mask_key
        self.history_key = history_key
        self.text_key = text_key
        self.tokens_key = tokens_key
        self.masks_key = masks_key
        self.log_probs_key = log_probs_key
        self.generation_info_key = generation_info_key
        self.input_key = input_key or (input_mode, "prompt" if generate else "full")
        self.in_keys = [self.input_key]
        check_batching(batching, min_batch_size, max_batch_size)
        self._min_batch_size = (
            1 if batching and min_batch_size is None else min_batch_size
        )
        self._max_batch_size = max_batch_size
        self._batching_timeout = batching_timeout
        self._batcher = self._make_batcher()
        self.generate_kwargs = self._standardize_generate_kwargs(
            dict(generate_kwargs or {})
        )
        params = translate(self.generate_kwargs)
        self.num_samples, self.inplace = check_samples(
            generate, params.n, num_samples, inplace
        )
        self.sampling_params = replace(params, n=self.num_samples or params.n)
        keys = self.key_by_container(self.sampling_params)
        check_column_keys(self.token_columns, keys, self.input_key)
        self.out_keys = list(keys.values())
        self.tokenizer_kwargs = check_tokenizer_kwargs(tokenizer_kwargs, pad_output)
        # Resolved once, also for the versions made from this wrapper.
        self.model = self._arguments["model"] = _to_engine(model)
        check_sampling(generate, self.sampling_params.engine, self.model.capabilities)
        if tokenizer is None:
            tokenizer = self.model.get_tokenizer()
        elif isinstance(tokenizer, str):
            tokenizer = self.model.get_tokenizer(tokenizer)
        self.set_tokenizer(tokenizer)

    @classmethod
    def _validate_parameter_combinations(
        cls, generate_kwargs: Mapping[str, Any]
    ) -> None:
        """TorchRL's own checks, except that SGLang's ``top_k=-1`` means no limit."""
        check_numbers(generate_kwargs)
        compared = {
            name: value
            for name, value in generate_kwargs.items()
            if (name, value) != ("top_k", -1)
        }
        try:
            super()._validate_parameter_combinations(compared)
        except ValueError as error:
            remedy = "; give -1 for no limit." if "top_k" in str(error) else ""
            raise ConfigurationError(f"{error}{remedy}") from None

    def key_by_container(self, params: SamplingParams) -> dict[str, NestedKey]:
        """Maps each container to its key, in the order of ``out_keys``."""
        info = self.return_generation_info or params.top_logprobs > 0
        written = (
            ("text", self.text_key, self.return_text),
            ("masks", self.masks_key, True),
            ("tokens", self.tokens_key, True),
            ("log_probs", self.log_probs_key, self.return_log_probs),
            ("history", self.history_key, self.return_history),
            ("generation_info", self.generation_info_key, self.generate and info),
        )
        keys = {name: key for name, key, is_written in written if is_written}
        return keys | {column.name: column.name for column in self.token_columns}

    @property
    def token_layouts(self) -> list[TokenLayout]:
        """Forms of the token columns."""
        limits = self.model.capabilities
        return [column.layout(limits) for column in self.token_columns]

    def _make_batcher(self) -> Batcher[SampleRequest, Completion] | None:
        if not self.batching:
            return None
        return Batcher(
            lambda requests: ask(
                self.model, requests, tokenizer=self.tokenizer, return_exceptions=True
            ),
            min_size=1 if self._min_batch_size is None else self._min_batch_size,
            max_size=self._max_batch_size,
            timeout=self._batching_timeout,
        )

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replaces the tokenizer, which is not modified."""
        self.tokenizer = tokenizer
        self._arguments["tokenizer"] = tokenizer
        padding_value = getattr(tokenizer, "pad_token_id", None)
        if padding_value is None:
            padding_value = getattr(tokenizer, "eos_token_id", None)
        self.padding_value = padding_value
        if self.input_mode == "history":
            if tokenizer is None:
                raise ConfigurationError(
                    "History input needs a tokenizer, and the engine has none; pass "
                    "tokenizer=..."
                )
            source = choose_template(
                tokenizer,
                name=self.chat_template_name,
                template=self.chat_template,
                by_model=True,
            )
            variables = self._arguments["chat_template_kwargs"]
            self.template = ChatTemplate(tokenizer, source, template_kwargs=variables)

    def get_new_version(self, **kwargs: Any) -> SGLangWrapper:
        """Returns a wrapper with these arguments changed and all others kept.

        Two exceptions: an ``input_key`` is not kept for another ``input_mode`` or
        ``generate``, and a scoring wrapper returns the model's own log-probs, no
        generation info and no token columns.
        """
        arguments = {**self._arguments, **kwargs}
        if "num_samples" in kwargs and "generate_kwargs" not in kwargs:
            names = ("n", "num_return_sequences")
            arguments["generate_kwargs"] = {
                name: value
                for name, value in (arguments["generate_kwargs"] or {}).items()
                if name not in names
            }
        moved = {"input_mode", "generate"} & set(kwargs)
        if moved and "input_key" not in kwargs:
            arguments["input_key"] = None
        if not arguments["generate"]:
            scoring = {
                "return_log_probs": None,
                "return_generation_info": False,
                "logprobs_mode": "model",
                "token_columns": (),
            }
            arguments.update({**scoring, **kwargs})
        return type(self)(**arguments)

    @set_list_to_stack(True)
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Generates or scores a batch.

        Args:
            tensordict: of any non-empty batch shape, ``()`` included.

        Keyword Args:
            tensordict_out: TensorDict to write to; overrides ``inplace``.
            logits_only: must be False: an engine returns no logits.
            **kwargs: sampling parameters of this call; override ``generate_kwargs``.

        Returns:
            The TensorDict that was written to.

        Raises:
            ConfigurationError: before anything is sent, if there is no TensorDict, the
                input key is missing, an attention mask does not fit its tokens, a
                prompt or argument is invalid, or the output TensorDict is locked or has
                another shape.
            TypeError: if the value under the input key has the wrong type.
        """
        if logits_only:
            _raise_no_logits()
        if not is_tensor_collection(tensordict):
            raise ConfigurationError(
                f"A policy takes a TensorDict, got {tensordict!r:.100}, a "
                f"{type(tensordict).__name__}; texts go to engine.generate()."
            )
        shape = self._output_shape(tensordict)
        if shape.numel() == 0:
            raise ConfigurationError(
                f"The batch of shape {tuple(tensordict.batch_size)} is empty; there is "
                f"nothing to do."
            )
        params = self._merge(kwargs) if kwargs else self.sampling_params
        keys = self.key_by_container(params)
        if tensordict_out is None and self.inplace is True:
            tensordict_out = tensordict
        outputs.check_target(tensordict_out, keys.values(), shape, self._device)

        prompts = self._read(tensordict)
        requests = self._to_requests(prompts, params)
        if self._batcher is not None:
            completions: list[Any] = self._batcher.submit(requests)
        else:
            completions = ask(self.model, requests, tokenizer=self.tokenizer)
        return self._write(
            tensordict, prompts, completions, params, target=tensordict_out
        )

    def begin(
        self, tensordict: TensorDictBase
    ) -> tuple[PromptBatch, list[SampleRequest]]:
        """Returns the prompts of a batch, and the requests for its responses.

        With :meth:`finish`, this is :meth:`forward` without the engine's part.
        """
        prompts = self._read(tensordict)
        return prompts, self._to_requests(prompts, self.sampling_params)

    def finish(
        self,
        tensordict: TensorDictBase,
        prompts: PromptBatch,
        completions: Sequence[Completion],
    ) -> TensorDictBase:
        """Writes the responses to a batch that :meth:`begin` has read."""
        target = tensordict if self.inplace is True else None
        return self._write(
            tensordict, prompts, completions, self.sampling_params, target=target
        )

    @collect_garbage_afterwards()
    def _write(
        self,
        tensordict: TensorDictBase,
        prompts: PromptBatch,
        completions: Sequence[Completion],
        params: SamplingParams,
        *,
        target: TensorDictBase | None,
    ) -> TensorDictBase:
        shape = self._output_shape(tensordict)
        samples = self._to_samples(prompts, completions, params)
        containers = outputs.assemble(
            samples,
            shape,
            pad_output=self.pad_output,
            padding_value=self.padding_value or 0,
            device=tensordict.device,
            layouts=self.token_layouts,
        )
        written = self._target(tensordict, target, shape)
        for name, key in self.key_by_container(params).items():
            value = containers[name]
            written.set(key, value if self._device is None else value.to(self._device))
        return written

    def _output_shape(self, tensordict: TensorDictBase) -> torch.Size:
        samples = [self.num_samples] if self.generate and self.num_samples else []
        return torch.Size([*tensordict.batch_size, *samples])

    def _merge(self, kwargs: Mapping[str, Any]) -> SamplingParams:
        standard = self._standardize_generate_kwargs(dict(kwargs))
        params = translate(standard, defaults=self.sampling_params)
        if "num_return_sequences" in standard and params.n != (self.num_samples or 1):
            raise ConfigurationError(
                f"The number of samples is part of the output's shape; make another "
                f"wrapper with get_new_version(num_samples={params.n})."
            )
        return params

    @collect_garbage_afterwards()
    def _read(self, td: TensorDictBase) -> PromptBatch:
        if td.ndim == 0 and (self.input_mode != "history" or self.prefer_tokens):
            td = lazy_stack([td])
        elif td.ndim > 1:
            td = td.reshape(-1)
        if self.input_mode == "history":
            return read_history(
                td,
                self.input_key,
                template=self.template,
                known_tokens=self._known_tokens(td),
                padding_value=self.padding_value,
                generate=self.generate,
            )
        if self.input_mode == "text":
            names = ("padding", "padding_side", "return_tensors")
            kwargs = {k: v for k, v in self.tokenizer_kwargs.items() if k not in names}
            return read_text(
                td, self.input_key, tokenizer=self.tokenizer, tokenizer_kwargs=kwargs
            )
        return self._read_tokens(td, self.input_key, self.attention_mask_key)

    def _read_tokens(
        self, td: TensorDictBase, key: NestedKey, mask_key: NestedKey | None = None
    ) -> PromptBatch:
        return read_tokens(
            # Only a lazy stack returns rows of different lengths.
            td if isinstance(td, LazyStackedTensorDict) else td.to_lazystack(0),
            key,
            attention_mask_key=mask_key,
            written_mask_key=_join(self.masks_key, "all_attention_mask"),
            padding_value=self.padding_value,
            # Scores of a padded input keep its padding.
            keep_layout=self.pad_output and not self.generate,
        )

    def _known_tokens(self, td: TensorDictBase) -> list[list[int]] | None:
        """Returns the tokens of earlier turns, with ``prefer_tokens``."""
        if self.prefer_tokens and self.generate:
            for field in ("full", "prompt"):
                key = _join(self.tokens_key, field)
                if key in td:
                    return self._read_tokens(td, key).token_ids
        return None

    def _to_requests(
        self, prompts: PromptBatch, params: SamplingParams
    ) -> list[SampleRequest]:
        request = self.make_request(params)
        per_sample: list[Mapping[str, Any]] = [{"max_new_tokens": 0}]
        if self.generate:
            per_sample = [params.for_sample(n) for n in range(self.num_samples or 1)]
        return [
            replace(request, input_ids=ids, sampling_params=sampling_params)
            for ids in prompts.token_ids
            for sampling_params in per_sample
        ]

    def make_request(self, params: SamplingParams) -> SampleRequest:
        """Returns a request of this wrapper that has no prompt yet."""
        log_probs = self.generate and self.return_log_probs
        return SampleRequest(
            input_ids=(),
            sampling_params=params.engine,
            return_logprobs=log_probs,
            return_prompt_logprobs=not self.generate
            or (log_probs and params.prompt_logprobs),
            top_logprobs=params.top_logprobs if self.generate else 0,
            include_stop=params.include_stop_str_in_output,
            logprobs_mode=self.logprobs_mode,
            adapter=self.adapter,
            token_columns=self.token_columns,
        )

    def end_tokens(self, params: SamplingParams) -> EndTokens:
        """Returns the tokens that end a turn when they are the last of a response."""
        return turn_end_tokens(
            params.engine,
            eos_token_ids=self.model.capabilities.eos_token_ids,
            tokenizer=self.tokenizer,
            template=self.template if self.input_mode == "history" else None,
        )

    def _to_samples(
        self,
        prompts: PromptBatch,
        completions: Sequence[Completion],
        params: SamplingParams,
    ) -> list[outputs.Sample]:
        if not self.generate:
            return outputs.scored(prompts, completions, self.padding_value or 0)
        ends, texts, turn_ends = self.end_tokens(params), None, None
        if self.return_text:
            texts = outputs.read_texts(
                completions,
                [ends.drop_last(completion.token_ids) for completion in completions],
                tokenizer=self.tokenizer,
                skip_special_tokens=params.skip_special_tokens,
            )
        if "generation_info" in self.key_by_container(params):
            turn_ends = [ends.have_ended(done.token_ids) for done in completions]
        return outputs.generated(
            prompts,
            completions,
            log_probs=self.return_log_probs,
            layouts=self.token_layouts,
            texts=texts,
            ended=turn_ends,
            top_logprobs=params.top_logprobs,
        )

    def _target(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None,
        shape: torch.Size,
    ) -> TensorDictBase:
        """Returns the TensorDict to write to, without the keys to be written."""
        if tensordict_out is not None:
            return tensordict_out.exclude(*self.out_keys, inplace=True)
        if self.inplace == "empty":
            return tensordict.empty()
        device = tensordict.device if self._device is None else self._device
        empty = [TensorDict(device=device) for _ in range(shape.numel())]
        return outputs.stack(empty, shape)

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Any:
        """Scores ``data`` and returns the log-prob of each of its tokens.

        Args:
            data: input of :meth:`forward`; it is not modified.
            **get_kwargs: for :meth:`~tensordict.TensorDictBase.get`, such as
                ``as_list=True`` or ``as_padded_tensor=True``.

        Raises:
            RuntimeError: if this wrapper generates.
        """
        if self.generate:
            raise RuntimeError("log_prob not callable when generate=True.")
        scored = self(data.copy())
        return scored.get(_join(self.log_probs_key, "full"), **get_kwargs)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: an engine returns no logits."""
        _raise_no_logits()

    get_dist_with_prompt_mask = get_dist
    _get_dist_with_prompt_mask = get_dist
    _get_dist_with_assistant_mask = get_dist
    _get_dist_with_attention_mask = get_dist
    _get_dist_with_custom_mask = get_dist
    _get_sft_dist = get_dist
    _get_rlhf_dist = get_dist
    _get_generic_dist = get_dist

    def cleanup_batching(self, *, flush: bool = False) -> None:
        """Fails the calls that wait to be batched; calls in flight complete.

        Args:
            flush: ignored; waiting calls run their own batches.
        """
        batcher = getattr(self, "_batcher", None)
        if batcher is not None:
            batcher.cancel()

    def get_batching_state(self) -> dict[str, Any]:
        """Returns the batching settings and queue under TorchRL's keys.

        ``queue_size`` counts queued prompts, ``pending_futures`` also those in flight.
        ``lock_state`` follows ``processing``: no lock is held while the engine works.
        """
        if self._batcher is None:
            return {"batching_enabled": False}
        queued, in_flight = len(self._batcher), self._batcher.running
        return {
            "batching_enabled": True,
            "min_batch_size": self._min_batch_size,
            "max_batch_size": self._max_batch_size,
            "queue_size": queued,
            "processing": in_flight > 0,
            "lock_state": "locked" if in_flight else "unlocked",
            "pending_futures": queued + in_flight,
            "timeout": self._batching_timeout,
        }

    def __getstate__(self) -> dict[str, Any]:
        # The weak reference to the collector and the batcher's locks cannot be pickled.
        state = dict(self.__dict__)
        state.pop("_collector", None)
        state["_batcher"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batcher = self._make_batcher()


def _raise_no_logits() -> NoReturn:
    raise NotImplementedError(
        "SGLang does not return logits, so there is no distribution to build; use "
        "log_prob(), or TransformersWrapper for the trained model."
    )


def _to_engine(model: RLSGLangEngine | str) -> RLSGLangEngine:
    if isinstance(model, RLSGLangEngine):
        return model
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        return AsyncSGLang.connect(model)
    if isinstance(model, (str, os.PathLike)):
        return AsyncSGLang.from_pretrained(model)
    raise ConfigurationError(
        f"model must be an RLSGLangEngine, the URL of a server, or the name of a "
        f"model. Got {type(model)}"
    )


def _join(key: NestedKey, field: str) -> tuple[str, ...]:
    return (key, field) if isinstance(key, str) else (*key, field)

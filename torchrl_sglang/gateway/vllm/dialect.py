"""vLLM's dialect: tokens in, tokens out, and OpenAI's requests with vLLM's fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http.client import responses
from typing import Any

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    ConfigurationError,
    GatewayError,
    UnsupportedByServerError,
)
from torchrl_sglang.gateway.dialects.base import (
    Dialect,
    Endpoint,
    Failure,
    pop_object,
)
from torchrl_sglang.gateway.dialects.openai import (
    check_integer,
    make_request,
    read_chat,
    read_completion,
)
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.vllm.answers import GenerateWriter, VLLMWriter
from torchrl_sglang.gateway.vllm.controls import Controls
from torchrl_sglang.support.checks import check_seconds
from torchrl_sglang.types import ServerCapabilities

DEFAULT_MAX_TOKENS = 16
"""vLLM's ``max_tokens`` of ``/v1/completions``."""

_REFUSED = {
    "features": "give the prompt as token_ids; images are not supported",
    "content_parts": "give the prompt as token_ids; images are not supported",
    "kv_transfer_params": "SGLang's servers disaggregate by their own router",
    "ec_transfer_params": "SGLang's servers disaggregate by their own router",
    "prompt_embeds": "give token ids",
    "allowed_token_ids": "use logit_bias, or a grammar",
    "bad_words": "use logit_bias",
    "logprob_token_ids": "use logprobs",
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "all positions of the prompt are returned",
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "use_beam_search": "SGLang samples only",
    "extra_args": "SGLang's servers have no such arguments",
    "vllm_xargs": "SGLang's servers have no such arguments",
    "repetition_detection": "use repetition_penalty",
    "trace_decode_token_ids": "responses cannot be prescribed",
    "skip_reading_prefix_cache": "weight updates empty the cache",
    "return_token_offsets": "decode the token ids",
    "return_prompt_text": "decode prompt_token_ids",
    "flat_logprobs": "leave it out",
    "include_stop_str_in_output": "token_ids include the stop string's tokens",
}
"""vLLM's fields that SGLang cannot serve -> alternative."""

_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "continue_final_message": False,
    "echo": False,
    "include_reasoning": True,
    "mm_processor_kwargs": {},
    "output_mode": "tokens",
    "return_mm_kwargs": True,
    "thinking_token_budget": -1,
}
"""vLLM's fields that have no effect with its default, the only value here."""

_FORM = frozenset(
    {
        *("detokenize", "output_kind", "skip_clone", "stream_interval", "session_id"),
        *("watermarking", "truncation_side", "length_penalty", "token_offsets"),
    }
)
"""vLLM's fields that change no token of a whole response."""

_KNOWN = frozenset({"cache_salt", "seed", *_DEFAULTS, *_REFUSED, *_FORM})
"""All of these fields."""

_GRAMMARS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM's ``structured_outputs`` -> SGLang's parameter."""

_TYPES = {
    **{status: phrase for status, phrase in responses.items() if 400 <= status < 500},
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
"""Status -> vLLM's type of an error."""


class VLLM(Dialect):
    """vLLM's protocol for trainers, served by an engine of SGLang.

    Clients such as TRL's ``AsyncGRPOTrainer``, `renderers` and the ``TrainClient`` of
    `verifiers` work unmodified. It has ``/inference/v1/generate``, OpenAI's
    completions with vLLM's fields, and the calls for pauses, weight updates, sleep and
    adapters.

    Args:
        engine: the gateway's engine. Trainers' weights need servers that were started
            with ``custom_weight_loader=``:data:`LOADERS`.

    Keyword Args:
        update_timeout: timeout of each part of a weight update, in seconds. Defaults to
            600.

    Examples:
        >>> import httpx
        >>> with Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway:
        ...     url = f"{gateway.url}/inference/v1/generate"
        ...     body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
        ...     (choice,) = httpx.post(url, json=body).json()["choices"]
        >>> len(choice["token_ids"]) <= 4
        True
    """

    def __init__(
        self, engine: RLSGLangEngine, *, update_timeout: float = 600.0
    ) -> None:
        self._engine = engine
        self._controls = Controls(
            engine, timeout=check_seconds("update_timeout", update_timeout)
        )
        self.controls = self._controls.routes
        writes: dict[str, Any] = {"write": VLLMWriter}
        self.endpoints = (
            Endpoint(
                path="/inference/v1/generate",
                read=self._read_generate,
                write=GenerateWriter,
            ),
            Endpoint(
                path="/v1/chat/completions",
                read=self._read_chat,
                **writes,
            ),
            Endpoint(
                path="/v1/completions",
                read=partial(self._read, _read_completion),
                **writes,
            ),
        )

    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""
        kind = _TYPES.get(failure.status, "InternalServerError")
        about = {"message": failure.message, "type": kind}
        return {"error": {**about, "param": failure.param, "code": failure.status}}

    def _read_generate(self, body: Mapping[str, Any]) -> Request:
        """Returns a request to ``/inference/v1/generate``."""
        fields = dict(body)
        if not isinstance(fields.get("sampling_params"), Mapping):
            raise ConfigurationError("sampling_params: Field required, an object.")
        params = pop_object(fields, "sampling_params")
        if both := sorted(params.keys() & fields.keys()):
            raise ConfigurationError(f"{', '.join(both)}: give it once.")
        if params.get("max_tokens") is None:
            params["max_tokens"] = self._engine.capabilities.max_context
        if params.get("logprobs") == 1:
            # The sampled token is the first of the likeliest, unlike in completions.
            params["logprobs"] = 0
        return self._read(_read_tokens, {**fields, **params}, decodes=False)

    def _read_chat(self, body: Mapping[str, Any]) -> Request:
        """Returns a request to ``/v1/chat/completions``."""
        limits = {"max_tokens", "max_completion_tokens"}
        if not any(body.get(name) is not None for name in limits):
            body = {**body, "max_tokens": self._engine.capabilities.max_context}
        return self._read(read_chat, _without(body, "add_special_tokens", value=False))

    def _read(
        self,
        read: Callable[[Any], Request],
        body: Mapping[str, Any],
        *,
        decodes: bool = True,
    ) -> Request:
        """Returns a request with vLLM's fields beside a protocol's."""
        fields, capabilities = dict(body), self._engine.capabilities
        about = _pop_answer_fields(fields)
        attributes = _pop_sampling(fields, capabilities)
        ignored = _pop_ignored(fields, capabilities)
        request_id = fields.pop("request_id", None)
        fields |= _structured(pop_object(fields, "structured_outputs"))
        if fields.get("top_k") == 0:
            fields["top_k"] = -1
        request = read(fields)
        about["model"] = request.model or self._served_name
        sampling = replace(
            request.sampling, **attributes, adapter=self._adapter(request.model)
        )
        return replace(
            request,
            sampling=sampling,
            about=about,
            decodes=decodes,
            request_id=None if request_id is None else str(request_id),
            ignored=(*request.ignored, *ignored),
        )

    @property
    def _served_name(self) -> str:
        served = self._engine.capabilities.server_args.get("served_model_name")
        return str(served or self._engine.model_path)

    def _adapter(self, model: str) -> str | None:
        """Returns the adapter that a model's name selects; refuses unknown names."""
        if not model:
            return None
        engine = self._engine
        if model in engine.adapters:
            return model
        served = self._served_name
        names = {engine.model_path, engine.capabilities.model_path, served}
        # A server is started with the path of a folder from here, too.
        if (
            model not in names
            and os.path.abspath(os.path.expanduser(model)) not in names
        ):
            raise GatewayError(
                f"The model `{model}` does not exist; there are "
                f"{', '.join([served, *engine.adapters])}.",
                status=404,
                param="model",
            )
        return None


def _read_tokens(fields: Mapping[str, Any], name: str = "token_ids") -> Request:
    fields = dict(fields)
    token_ids = _check_tokens(name, fields.pop(name, None))
    top = fields.pop("logprobs", None)
    return make_request(
        fields,
        token_ids=token_ids,
        logprobs=top is not None,
        top=top,
        top_name="logprobs",
    )


def _read_completion(fields: Mapping[str, Any]) -> Request:
    fields = {"max_tokens": DEFAULT_MAX_TOKENS, **fields}
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return _read_completions(fields, prompt)
    if not isinstance(prompt, list) or not prompt:
        return read_completion(_without(fields, "add_special_tokens", value=True))
    fields.pop("add_special_tokens", None)
    if fields.pop("echo", None):
        raise ConfigurationError("echo needs a prompt that is a text.")
    return _read_tokens(fields, "prompt")


def _read_completions(fields: Mapping[str, Any], prompts: Sequence[Any]) -> Request:
    """Returns a request with several prompts."""
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt:
            _check_tokens("prompt", prompt)
    for name in ("stream", "echo") if len(prompts) > 1 else ():
        if fields.get(name):
            raise ConfigurationError(
                f"{name} is not supported with several prompts; send several requests."
            )
    request = _read_completion({**fields, "prompt": prompts[0]})
    return replace(request, more_prompts=prompts[1:])


def _without(fields: Mapping[str, Any], name: str, *, value: Any) -> dict[str, Any]:
    """Returns fields without one that has vLLM's default."""
    return {k: v for k, v in fields.items() if k != name or v != value}


def _check_tokens(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return value
    raise ConfigurationError(f"{name} must be a list of at least one token id.")


def _pop_answer_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields about the answer, and returns those that are set."""
    names = ("return_token_ids", "return_tokens_as_token_ids")
    about: dict[str, Any] = {n: True for n in names if fields.pop(n, None)}
    start = fields.pop("routed_experts_prompt_start", None)
    if start is not None:
        name = "routed_experts_prompt_start"
        about[name] = check_integer(name, start, 0, 2**31)
    return about


def _pop_sampling(
    fields: dict[str, Any], capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Removes vLLM's own sampling fields, and returns the attributes of `Sampling`."""
    prompt_logprobs = fields.pop("prompt_logprobs", None)
    if prompt_logprobs not in (None, 0):
        raise ConfigurationError(
            f"prompt_logprobs={prompt_logprobs!r}: only the log-prob of each prompt "
            f"token itself is returned; give 0."
        )
    priority = fields.pop("priority", None) or None
    if priority is not None:
        priority = _priority(priority, capabilities)
    return {
        "keeps_aborted": True,
        "prompt_logprobs": prompt_logprobs is not None,
        "priority": priority,
    }


def _priority(value: Any, capabilities: ServerCapabilities) -> int:
    """Returns SGLang's priority for vLLM's, of which the lowest comes first."""
    check_integer("priority", value, -(2**31), 2**31)
    if not capabilities.args.enable_priority_scheduling:
        raise UnsupportedByServerError(
            f"Got priority {value} but Priority scheduling is not enabled; start the "
            f"servers with --enable-priority-scheduling."
        )
    low_first = capabilities.args.schedule_low_priority_values_first
    return int(value if low_first else -value)


def _pop_ignored(
    fields: dict[str, Any], capabilities: ServerCapabilities
) -> tuple[str, ...]:
    """Removes fields without effect here, and returns those that are set."""
    if _KNOWN.isdisjoint(fields):
        return ()
    for name, default in _DEFAULTS.items():
        if fields.get(name) == default:
            fields.pop(name, None)
    for name, advice in _REFUSED.items():
        if fields.pop(name, None):
            raise ConfigurationError(f"{name} is not supported; {advice}.")
    for name in _FORM:
        fields.pop(name, None)
    # The version of the weights is the key of the prefix cache.
    names = ["cache_salt"] if capabilities.uses_seeds else ["cache_salt", "seed"]
    return tuple(name for name in names if fields.pop(name, None) is not None)


def _structured(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameter for vLLM's ``structured_outputs``."""
    params: dict[str, Any] = {}
    for name, value in given.items():
        if not value:
            continue
        if name == "json_object":
            params["response_format"] = {"type": "json_object"}
        elif name == "json" and isinstance(value, Mapping):
            schema = {"schema": value}
            params["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif name in _GRAMMARS:
            params[_GRAMMARS[name]] = value
        else:
            raise ConfigurationError(
                f"structured_outputs.{name} is not supported; give one of "
                f"{', '.join((*_GRAMMARS, 'json_object'))}."
            )
    return params

"""Detects what a server can do, from its routes and answers.

This is the only file that knows how SGLang's versions differ. It never reads version
numbers, so a new release needs no change as long as it keeps the routes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Set
from typing import Any

import orjson
import torch

from torchrl_sglang.backends.client.checkpoint_mark import original_model
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import ServerCapabilities

__all__ = ["find_out", "interpret", "load_model_config"]

CONNECT_BUDGET_SECONDS = 30.0

_SECRET = ("api_key", "password", "launch_command", "internal_states")
"""Suffixes of arguments that are not kept: a server reveals its keys."""

_LORA_TENSORS = "/load_lora_adapter_from_tensors"

_LORA_FIELDS = ("serialized_named_tensors", "serialized_tensors")
"""Its field for the tensors, newest first: one copy per tensor-parallel rank, or one
text."""

_INFO_ROUTES = ("/server_info", "/get_server_info")
"""Routes of a server's arguments and its scheduler's state, newest first."""

_LOAD_ROUTES = ("/v1/loads", "/get_load")
"""Routes of the number of running requests, newest first."""


_SAME = (
    "vocab_size",
    "max_context",
    "max_prompt",
    "dtype",
    "tp_size",
    "pp_size",
    "dp_size",
    "needs_update_session",
    "has_tokenizer",
    "has_grammar",
    "has_lora",
    "lora_tensors_field",
    "can_sleep",
    "keeps_weights",
    "uses_seeds",
    "streams_deltas",
    "default_sampling_params",
)
"""Capabilities that all servers of an engine must share."""


_TO_SLEEP: Mapping[str, tuple[Any, ...]] = {
    "enable_memory_saver": (True,),
    # Weights that servers share through a daemon.
    "weight_cache_mode": ("off", None),
    # In-flight copies of caches are not visible from outside.
    "enable_hierarchical_cache": (False, None),
    "disaggregation_mode": ("null", None),
}
"""Argument values with which a server can release memory. Without the first it only
says that it did; with other values it can end."""


def sleep_obstacles(
    server_args: Mapping[str, Any],
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value, required value) of arguments that prevent sleeping."""
    for name, allowed in _TO_SLEEP.items():
        value = server_args.get(name)
        if value not in allowed:
            yield name, value, allowed[0]


async def find_out(
    http: HttpClient,
    url: str,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
) -> ServerCapabilities:
    """Asks the server at ``url`` what it can do.

    ``model`` is a folder or hub name with the served model's ``config.json``, where the
    path that the server reports cannot be read here.
    """

    async def ask(path: str) -> dict[str, Any]:
        answer = await http.request("GET", url + path, timeout=CONNECT_BUDGET_SECONDS)
        if answer.status in (401, 403):
            raise ConfigurationError(
                f"{answer.url} asks for a key (HTTP {answer.status}); give the "
                f"server's as api_key=..."
            )
        if answer.status == 404:
            raise ServerUnavailableError(
                f"There is no {answer.url}; that is not an SGLang server."
            )
        content = answer.raise_for_status().json()
        if not isinstance(content, dict):
            raise ServerUnavailableError(
                f"{url}{path} answered {content!r:.100}; that is not an SGLang server."
            )
        return content

    described = await _ask_routes(ask, url)
    routes = set(described["paths"])
    server_info = await ask(_first(routes, _INFO_ROUTES, url))
    model_info = await ask(_first(routes, ("/model_info", "/get_model_info"), url))
    models = await ask("/v1/models")
    try:
        # The folder of a disk update may be gone; its mark names the original model.
        served = original_model(str(model_info["model_path"]))
        started = str(server_info.get("model_path") or served)
        # In a thread: a model's files can be on slow storage.
        served, vocab_size, eos_token_ids = await asyncio.to_thread(
            _read_model,
            model,
            served,
            started,
            trust_remote_code,
            server_info.get("revision"),
        )
        return interpret(
            url=url,
            routes=routes,
            server_info=server_info,
            model_info={**model_info, "model_path": served},
            models=models,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            lora_fields=fields_of(described, _LORA_TENSORS),
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ServerUnavailableError(
            f"The answers of {url} are not understood ({error!r}); is it an "
            f"SGLang server that this package supports?"
        ) from error


def _read_model(
    model: str | None,
    served: str,
    started: str,
    trust_remote_code: bool,
    revision: str | None,
) -> tuple[str, int, tuple[int, ...]]:
    """Returns the readable model path, its vocabulary size and its end tokens."""
    # A revision belongs to the name that the server was started with.
    revision = None if model else revision
    try:
        config = load_model_config(model or served, trust_remote_code, revision)
    except ConfigurationError:
        if model or started == served:
            raise
        served = started
        config = load_model_config(started, trust_remote_code, revision)
    vocab_size = int(config.get_text_config().vocab_size)
    return served, vocab_size, find_eos_token_ids(config, model or served, revision)


async def _ask_routes(ask: Any, url: str) -> dict[str, Any]:
    content = await ask("/openapi.json")
    paths = content.get("paths")
    if not isinstance(paths, dict) or "/generate" not in paths:
        raise ServerUnavailableError(
            f"{url} has no /generate; that is not an SGLang server."
        )
    described: dict[str, Any] = content
    return described


def fields_of(described: Mapping[str, Any], path: str) -> set[str]:
    """Returns the fields that a route takes, from an OpenAPI description."""
    try:
        content = described["paths"][path]["post"]["requestBody"]["content"]
        schema: Any = content["application/json"]["schema"]
        if "$ref" in schema:
            place, schema = schema["$ref"], described
            for part in place.split("/")[1:]:
                schema = schema[part]
        return set(schema["properties"])
    except (KeyError, TypeError):
        return set()


def adapters_in(models: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the LoRA adapters among what a server answers to ``/v1/models``.

    Examples:
        >>> adapters_in({"data": [{"id": "base"}, {"id": "a", "parent": "base"}]})
        ('a',)
    """
    return tuple(str(card["id"]) for card in models["data"] if card.get("parent"))


def _first(routes: set[str], candidates: tuple[str, ...], url: str) -> str:
    for route in candidates:
        if route in routes:
            return route
    raise UnsupportedByServerError(
        f"The server at {url} has none of the routes {', '.join(candidates)}; its "
        f"version of SGLang is too old or too new for this package."
    )


def start_id(server_info: Mapping[str, Any]) -> str:
    """Returns what differs from one start of a server to the next. Pure.

    That is how long the phases of its start took, to the nanosecond, and the seed that
    it has drawn, where it was given none.

    Examples:
        >>> start_id({"random_seed": 7, "startup_time": {"e2e": 1.25}})
        '[7,{"e2e":1.25}]'
    """
    states = server_info.get("internal_states") or ()
    times = [server_info.get("startup_time"), *(s.get("startup_time") for s in states)]
    known = [server_info.get("random_seed"), *times]
    found = [each for each in known if each is not None]
    return orjson.dumps(found).decode() if found else ""


def check_same(
    first: ServerCapabilities, first_url: str, other: ServerCapabilities, other_url: str
) -> None:
    """Raises unless two servers are alike enough for one engine."""
    for name in _SAME:
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            raise ConfigurationError(
                f"The servers of one engine must be alike, and they differ in {name}: "
                f"{first_url} has {one!r}, {other_url} has {two!r}."
            )


_IMPORTING = threading.Lock()


def load_model_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Returns the Hugging Face configuration of a folder or a hub name."""
    # Each server's model is looked at in its own thread, and the modules that
    # transformers loads lazily fail in one thread while another one loads them.
    with _IMPORTING:
        from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except Exception as error:
        advice = why_untrusted(error, trust_remote_code) or (
            f"({type(error).__name__}: {str(error).splitlines()[0]}); pass model=... "
            f"with a folder or hub name that has the same config.json."
        )
        raise ConfigurationError(
            f"The configuration of the served model {model!r} cannot be read from "
            f"here {advice}"
        ) from error


def why_untrusted(error: Exception, trust_remote_code: bool) -> str | None:
    """Returns the end of the message for a model whose code is not trusted here."""
    if trust_remote_code or "trust_remote_code" not in str(error):
        return None
    return (
        "without running the code that comes with it. If you trust that code, give "
        "from_pretrained or connect trust_remote_code=True."
    )


def find_eos_token_ids(
    config: Any, model: str, revision: str | None = None
) -> tuple[int, ...]:
    """Returns the tokens that end a response.

    Like the server, it takes those of ``config.json`` and those of
    ``generation_config.json``, where there is one.
    """
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(
            model, revision=revision or "main"
        ).eos_token_id
    except OSError:  # Most models have the file, and none must.
        generation = None
    found: set[int] = set()
    for ids in (config.get_text_config().eos_token_id, generation):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


def interpret(
    *,
    url: str,
    routes: set[str],
    server_info: Mapping[str, Any],
    model_info: Mapping[str, Any],
    models: Mapping[str, Any],
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    lora_fields: Set[str] = frozenset(),
) -> ServerCapabilities:
    """Derives the capabilities from the answers of a server. Pure."""
    if not model_info.get("is_generation", True):
        raise UnsupportedByServerError(
            f"The server at {url} serves {model_info.get('model_path')!r}, which does "
            f"not generate text."
        )
    model_path = str(model_info["model_path"])
    max_context = int(models["data"][0]["max_model_len"])
    skip_tokenizer = bool(server_info.get("skip_tokenizer_init", False))
    grammar = server_info.get("grammar_backend")
    return ServerCapabilities(
        version=str(server_info.get("version", "unknown")),
        model_path=model_path,
        tokenizer_path=str(model_info.get("tokenizer_path") or model_path),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_context=max_context,
        # The scheduler refuses a prompt of max_req_input_len tokens or more.
        max_prompt=int(server_info.get("max_req_input_len") or max_context) - 1,
        dtype=_dtype(server_info.get("dtype")),
        tp_size=int(server_info.get("tp_size") or 1),
        pp_size=int(server_info.get("pp_size") or 1),
        dp_size=int(server_info.get("dp_size") or 1),
        needs_update_session="/begin_weight_update" in routes,
        load_route=_first(routes, _LOAD_ROUTES, url),
        info_route=next((r for r in _INFO_ROUTES if r in routes), _INFO_ROUTES[0]),
        has_tokenizer=not skip_tokenizer,
        has_grammar=grammar not in (None, "none"),
        weight_version=str(model_info.get("weight_version") or "default"),
        has_lora=bool(server_info.get("enable_lora")),
        lora_tensors_field=next(
            (name for name in _LORA_FIELDS if name in lora_fields), None
        ),
        adapters=adapters_in(models),
        can_sleep=not any(sleep_obstacles(server_info)),
        keeps_weights=bool(server_info.get("enable_weights_cpu_backup")),
        tells_paused="/ready" in routes,
        start_id=start_id(server_info),
        # Training on policy switches deterministic inference on.
        uses_seeds=bool(
            server_info.get("enable_deterministic_inference")
            or server_info.get("rl_on_policy_target")
        ),
        streams_deltas=bool(
            server_info.get("incremental_streaming_output")
            # Its name in older versions.
            or server_info.get("stream_output")
        ),
        default_sampling_params=_mapping(model_info.get("preferred_sampling_params")),
        server_args={
            name: value
            for name, value in server_info.items()
            if not name.endswith(_SECRET)
        },
    )


def _mapping(value: object) -> dict[str, Any]:
    # SGLang takes it as JSON, and tells it as it has it.
    content = orjson.loads(value) if isinstance(value, str) and value else value
    return dict(content) if isinstance(content, Mapping) else {}


def _dtype(name: object) -> torch.dtype | None:
    # "auto" means that the checkpoint decides.
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None

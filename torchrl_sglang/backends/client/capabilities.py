"""Detects the capabilities of a server from its routes and responses.

Only this file handles differences between SGLang's versions. It never reads version
numbers, so a new release needs no change as long as it keeps the routes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import fields
from typing import Any, Literal

import msgspec
import torch

from torchrl_sglang.backends.client.drafts import check_draft, drafts_by_ngrams
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.client.model_info import ModelReader
from torchrl_sglang.backends.client.quantization import find_quantization
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.support.urls import address_hint
from torchrl_sglang.types import (
    TRACED_LOADER,
    DraftUpdate,
    ExpertShape,
    ServerArgs,
    ServerCapabilities,
    WeightRoute,
)

_SECRET = ("api_key", "password", "launch_command", "internal_states")
"""Suffixes of dropped arguments: a server reveals its keys."""

_LORA_TENSORS = "/load_lora_adapter_from_tensors"

_LORA_FIELDS = ("serialized_named_tensors", "serialized_tensors")
"""Fields for an adapter's tensors, newest first: a copy per rank, or a text."""

_TENSOR_UPDATE = "/update_weights_from_tensor"
_BEGIN_UPDATE = "/begin_weight_update"

_INFO_ROUTES = ("/server_info", "/get_server_info")
"""Routes of a server's arguments and its scheduler's state, newest first."""

_MODEL_ROUTES = ("/model_info", "/get_model_info")
_LOAD_ROUTES = ("/v1/loads", "/get_load")
"""Routes of the number of running requests, newest first."""

_FED_BY_TENSORS = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
_MAY_DIFFER = {
    "version",
    "model_path",
    "tokenizer_path",
    "eos_token_ids",
    "load_route",
    "info_route",
    "weight_version",
    "adapters",
    "tells_paused",
    "start_id",
    "server_args",
}
"""Capabilities, possibly different between the servers of an engine."""

_TO_SLEEP: Mapping[str, tuple[Any, ...]] = {
    "enable_memory_saver": (True,),
    # Weights shared by servers through a daemon.
    "weight_cache_mode": ("off", None),
    # In-flight copies of caches are not visible from outside.
    "enable_hierarchical_cache": (False, None),
    "disaggregation_mode": ("null", None),
}
"""Argument values with which a server can release memory. Without the first, it reports
a release without effect; with other values, it can end."""


def sleep_obstacles(args: ServerArgs) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value, required value) of arguments in conflict with sleep."""
    for name, allowed in _TO_SLEEP.items():
        value = getattr(args, name)
        if value not in allowed:
            yield name, value, allowed[0]


def check_takes_weights(capabilities: ServerCapabilities) -> None:
    """Raises :class:`UnsupportedByServerError` if new weights would do harm."""
    if capabilities.stores_stale_prefixes:
        backend = capabilities.args.hicache_storage_backend
        raise UnsupportedByServerError(
            f"The servers run with hicache_storage_backend={backend!r}, which in "
            f"SGLang {capabilities.version} finds a stored prefix by its tokens alone: "
            f"after a weight update they would generate from prefixes of the old "
            f"weights. Start them without hicache_storage_backend, or with SGLang "
            f"0.5.20 or newer."
        )


def check_weight_route(
    capabilities: ServerCapabilities,
    route: WeightRoute,
    *,
    quantized: str | None = None,
    draft: DraftUpdate = "auto",
) -> None:
    """Raises UnsupportedByServerError if whole weights would break a server."""
    if capabilities.quantized not in (None, quantized):
        raise UnsupportedByServerError(
            f"The servers hold quantised weights ({capabilities.quantized!r}): SGLang "
            f"has transformed them when it loaded them, and would take others without "
            f"a scale, or break. Nothing was sent. Serve the model without "
            f"quantization or with rollout_dtype='fp8', or train a LoRA adapter, which "
            f"is loaded beside them."
        )
    if quantized is not None and route == "disk":
        raise UnsupportedByServerError(
            "SGLang transforms quantised weights once more when it loads them from "
            "files into a server that runs. Nothing was sent. Use "
            "transport='broadcast' or 'cuda_ipc'."
        )
    check_draft(capabilities, route, draft)


async def find_out(
    http: HttpClient,
    url: str,
    model: str | None = None,
    trust_remote_code: bool = False,
    reader: ModelReader | None = None,
) -> ServerCapabilities:
    """Detects a server's capabilities; ``model`` has a readable ``config.json``."""

    async def ask(path: str) -> dict[str, Any]:
        answer = await http.request("GET", url + path, timeout=30.0)
        if answer.status == 404:
            raise ServerUnavailableError(
                f"There is no {answer.url}; that is not an SGLang server."
                f"{address_hint(url)}"
            )
        content = answer.raise_for_status().json()
        if not isinstance(content, dict):
            raise ServerUnavailableError(
                f"{url}{path} answered {content!r:.100}; that is not an SGLang server."
            )
        return content

    described = await ask("/openapi.json")
    routes = described.get("paths")
    if not isinstance(routes, dict) or "/generate" not in routes:
        raise ServerUnavailableError(
            f"{url} has no /generate; that is not an SGLang server."
        )
    server_info = await ask(_first(routes, _INFO_ROUTES, url))
    model_info = await ask(_first(routes, _MODEL_ROUTES, url))
    models = await ask("/v1/models")
    try:
        facts = await (reader or ModelReader()).read(
            model,
            str(model_info["model_path"]),
            str(server_info.get("model_path") or ""),
            trust_remote_code,
            server_info.get("revision"),
        )
        return interpret(
            url=url,
            routes=set(routes),
            server_info=server_info,
            model_info={**model_info, "model_path": facts.path},
            models=models,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            lora_fields=fields_of(described, _LORA_TENSORS),
            tensor_fields=fields_of(described, _TENSOR_UPDATE),
            begin_fields=fields_of(described, _BEGIN_UPDATE),
            generate_fields=fields_of(described, "/generate"),
            quantization=facts.quantization,
            experts=facts.experts,
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ServerUnavailableError(
            f"The answers of {url} are not understood ({error!r}); is it an "
            f"SGLang server that this package supports?"
        ) from error


def fields_of(described: Mapping[str, Any], path: str) -> set[str]:
    """Returns the fields of a route, from an OpenAPI description."""
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
    """Returns the LoRA adapters in a server's response of ``/v1/models``."""
    return tuple(str(card["id"]) for card in models["data"] if card.get("parent"))


def _first(routes: Collection[str], candidates: tuple[str, ...], url: str) -> str:
    match = next((route for route in candidates if route in routes), None)
    if match is not None:
        return match
    raise UnsupportedByServerError(
        f"The server at {url} has none of the routes {', '.join(candidates)}; its "
        f"version of SGLang is too old or too new for this package."
    )


def weight_loaders(server_info: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a server's weight loaders."""
    return tuple(_names(server_info, "custom_weight_loader"))


def start_id(server_info: Mapping[str, Any]) -> str:
    """Returns an identifier of a server's start.

    It consists of the durations of the start's phases, in nanoseconds, and the server's
    drawn seed, if none was given.
    """
    states = server_info.get("internal_states") or ()
    times = [server_info.get("startup_time"), *(s.get("startup_time") for s in states)]
    values = [server_info.get("random_seed"), *times]
    present = [value for value in values if value is not None]
    return msgspec.json.encode(present).decode() if present else ""


def check_same(
    first: ServerCapabilities, first_url: str, other: ServerCapabilities, other_url: str
) -> None:
    """Raises unless two servers are compatible in an engine."""
    for name in (f.name for f in fields(first) if f.name not in _MAY_DIFFER):
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            raise ConfigurationError(
                f"The servers of one engine must be alike, and they differ in {name}: "
                f"{first_url} has {one!r}, {other_url} has {two!r}."
            )


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
    tensor_fields: Set[str] = frozenset(),
    begin_fields: Set[str] = frozenset(),
    generate_fields: Set[str] = frozenset(),
    quantization: Mapping[str, Any] | None = None,
    experts: ExpertShape | None = None,
) -> ServerCapabilities:
    """Derives the capabilities from the responses of a server."""
    if not model_info.get("is_generation", True):
        raise UnsupportedByServerError(
            f"The server at {url} serves {model_info.get('model_path')!r}, which does "
            f"not generate text."
        )
    model_path = str(model_info["model_path"])
    args = ServerArgs.read(server_info)
    max_context = int(models["data"][0]["max_model_len"])

    def has(*names: str) -> bool:
        return any(map(server_info.get, names))

    def size(name: str) -> int:
        return int(server_info.get(name) or 1)

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
        tp_size=size("tp_size"),
        pp_size=size("pp_size"),
        dp_size=size("dp_size"),
        needs_update_session="/begin_weight_update" in routes,
        # SGLang got both at once. A flush leaves the entries of a cache's storage, and
        # retracted requests would find them under the key of the old weights.
        keeps_requests="/begin_weight_update" in routes
        and not has("hicache_storage_backend"),
        load_route=_first(routes, _LOAD_ROUTES, url),
        info_route=next((r for r in _INFO_ROUTES if r in routes), _INFO_ROUTES[0]),
        weight_loaders=weight_loaders(server_info),
        has_tokenizer=not has("skip_tokenizer_init"),
        has_grammar=server_info.get("grammar_backend") not in (None, "none"),
        weight_version=str(model_info.get("weight_version") or "default"),
        has_lora=has("enable_lora"),
        lora_tensors_field=next((f for f in _LORA_FIELDS if f in lora_fields), None),
        adapters=adapters_in(models),
        can_sleep=not any(sleep_obstacles(args)),
        keeps_weights=has("enable_weights_cpu_backup"),
        tells_paused="/ready" in routes,
        start_id=start_id(server_info),
        # Training on policy enables deterministic inference. With speculative decoding,
        # older servers ignore seeds, and drafts depend on other requests.
        uses_seeds=has("enable_deterministic_inference", "rl_on_policy_target")
        and not has("speculative_algorithm"),
        speculates=has("speculative_algorithm"),
        # The second is its name in older versions.
        streams_deltas=has("incremental_streaming_output", "stream_output"),
        draft=_draft(server_info),
        biased_drafts=drafts_by_ngrams(server_info),
        graphs_up_to=_graphs_up_to(server_info, args),
        selects_draft="selector" in begin_fields,
        spares_draft="disable_draft_model" in tensor_fields,
        feeds_draft="selector" in begin_fields or _feeds_draft(server_info),
        encodes_top_logprobs="return_flat_raw_top_logprobs_b64" in generate_fields,
        has_traced_loader=TRACED_LOADER in _names(server_info, "custom_weight_loader"),
        quantized=find_quantization(quantization, args),
        # Stored prefixes have keys in versions with a readiness route.
        stores_stale_prefixes=args.hicache_storage_backend is not None
        and "/ready" not in routes,
        experts=experts,
        default_sampling_params=_mapping(model_info.get("preferred_sampling_params")),
        server_args={
            name: value
            for name, value in server_info.items()
            if not name.endswith(_SECRET)
        },
    )


def _draft(server_info: Mapping[str, Any]) -> Literal["separate", "same"] | None:
    """Returns the source of a draft model's weights.

    A model with multi-token prediction (MTP, NEXTN) drafts for itself: SGLang reports
    the served model as its draft, or none. NGRAM drafts from texts.
    """
    algorithm = server_info.get("speculative_algorithm")
    if not algorithm or drafts_by_ngrams(server_info):
        return None
    path = server_info.get("speculative_draft_model_path")
    return "same" if path in (None, "", server_info.get("model_path")) else "separate"


def _graphs_up_to(server_info: Mapping[str, Any], args: ServerArgs) -> int | None:
    """Returns the number of requests with CUDA graphs, if more can run."""
    decoding = _mapping(_mapping(server_info.get("cuda_graph_config")).get("decode"))
    limit = decoding.get("max_bs")
    if args.device != "cuda" or decoding.get("backend") == "disabled":
        return None
    states = server_info.get("internal_states") or [{}]
    top = states[0].get("effective_max_running_requests_per_dp")
    if not isinstance(limit, int) or (isinstance(top, int) and top <= limit):
        return None
    return limit


def _feeds_draft(server_info: Mapping[str, Any]) -> bool:
    """Returns whether an SGLang without selectors can load tensors into its draft.

    Its workers for other algorithms, and for multi-layer prediction, raise an error on
    such tensors, and the server ends.
    """
    algorithm = str(server_info.get("speculative_algorithm")).upper()
    return algorithm in _FED_BY_TENSORS and not server_info.get(
        "enable_multi_layer_eagle"
    )


def _names(server_info: Mapping[str, Any], name: str) -> list[Any]:
    value = server_info.get(name)
    return [value] if isinstance(value, str) else list(value or ())


def _mapping(value: object) -> dict[str, Any]:
    # Reported as JSON text, or as a mapping.
    content = msgspec.json.decode(value) if isinstance(value, str) and value else value
    return dict(content) if isinstance(content, Mapping) else {}


def _dtype(name: object) -> torch.dtype | None:
    # "auto" leaves the choice to the checkpoint.
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None

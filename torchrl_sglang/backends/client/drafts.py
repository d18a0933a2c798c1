"""Target models of a weight update with speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import DraftUpdate, ServerCapabilities, WeightRoute


def drafts_by_ngrams(server_args: Mapping[str, Any]) -> bool:
    """Returns whether a server's drafts come from texts, not from a model."""
    return str(server_args.get("speculative_algorithm")).upper() == "NGRAM"


def updates_draft(capabilities: ServerCapabilities, draft: DraftUpdate) -> bool:
    """Returns whether an update includes the draft model."""
    if draft == "auto":
        return capabilities.draft == "same"
    return draft == "update"


def model_fields(
    capabilities: ServerCapabilities, route: WeightRoute | None, draft: DraftUpdate
) -> dict[str, Any]:
    """Returns the fields of a call for its models; no route: it opens a session."""
    if capabilities.draft is None or route == "disk":
        return {}
    both = updates_draft(capabilities, draft)
    if capabilities.selects_draft:
        return {"selector": "all" if both else "target"}
    if route == "tensor" and not both and capabilities.spares_draft:
        return {"disable_draft_model": True}
    return {}


def check_draft(
    capabilities: ServerCapabilities, route: WeightRoute, draft: DraftUpdate
) -> None:
    """Checks the servers' support of an update's treatment of the draft model."""
    if capabilities.draft is None:
        if draft == "update":
            raise UnsupportedByServerError(
                "draft='update' is for servers with a draft model, and these have "
                "none. Nothing was sent. Leave draft out."
            )
        _check_ngram(capabilities, route)
        return
    both = updates_draft(capabilities, draft)
    if route == "disk" and not both:
        raise UnsupportedByServerError(
            f"The servers have a draft model that this update is not for "
            f"(draft={draft!r}), and SGLang loads a checkpoint into both models: it "
            f"would overwrite the draft. Nothing was sent. Use transport='broadcast' "
            f"or 'cuda_ipc', draft='update' if the draft is to take the same weights, "
            f"or serve the model without speculative decoding."
        )
    if capabilities.selects_draft or route == "disk":
        return
    if route == "distributed" and both:
        raise UnsupportedByServerError(
            f"The draft model is to take the weights (draft={draft!r}), and SGLang "
            f"{capabilities.version} broadcasts none to it: it would stay as it is. "
            f"Nothing was sent. Use transport='cuda_ipc' or 'disk', draft='keep', a "
            f"newer SGLang, or no speculative decoding."
        )
    if route == "tensor" and both and not capabilities.feeds_draft:
        raise UnsupportedByServerError(
            f"The draft model is to take the weights (draft={draft!r}), and SGLang "
            f"{capabilities.version} ends when it is given tensors for this kind of "
            f"draft. Nothing was sent. Use transport='disk', draft='keep', a newer "
            f"SGLang, or no speculative decoding."
        )
    if route == "tensor" and not both and not capabilities.spares_draft:
        raise UnsupportedByServerError(
            f"The draft model is to keep its weights (draft={draft!r}), and SGLang "
            f"{capabilities.version} gives tensors to both models: they would "
            f"overwrite the draft. Nothing was sent. Use transport='broadcast'."
        )


def _check_ngram(capabilities: ServerCapabilities, route: WeightRoute) -> None:
    """Raises the error if a server without a draft model would end."""
    ends = route == "disk" and not capabilities.selects_draft
    if ends and drafts_by_ngrams(capabilities.server_args):
        raise UnsupportedByServerError(
            f"SGLang {capabilities.version} ends when it is to load files while it "
            f"drafts by n-grams (speculative_algorithm='NGRAM'). Nothing was sent. Use "
            f"transport='broadcast' or 'cuda_ipc', a newer SGLang, or no speculative "
            f"decoding."
        )

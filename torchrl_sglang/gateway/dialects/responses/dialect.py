"""OpenAI's Responses: addresses for new and for earlier responses.

Source: the OpenAI API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from typing import Any

from torchrl_sglang.gateway.dialects.base import Asked, Endpoint, Failure, Lookup
from torchrl_sglang.gateway.dialects.openai import Completions
from torchrl_sglang.gateway.dialects.responses.items import find_response, input_items
from torchrl_sglang.gateway.dialects.responses.read import read_response
from torchrl_sglang.gateway.dialects.responses.write import (
    ResponseWriter,
    kept_response,
)

_PATH = "/v1/responses"


def _deleted(asked: Asked) -> dict[str, Any]:
    return {"id": asked.id, "object": "response", "deleted": True}


class Responses(Completions):
    """OpenAI's Responses, with the keys of its completions."""

    endpoints = (
        Endpoint(path=_PATH, read=read_response, recalls=True, write=ResponseWriter),
        Endpoint(
            path=f"{_PATH}/input_tokens",
            read=read_response,
            recalls=True,
            count=lambda tokens: {
                "object": "response.input_tokens",
                "input_tokens": tokens,
            },
        ),
    )
    lookups = (
        Lookup(path=f"{_PATH}/{{id}}", find=find_response, tell=kept_response),
        Lookup(path=f"{_PATH}/{{id}}", find=find_response, tell=_deleted, forgets=True),
        Lookup(
            path=f"{_PATH}/{{id}}/input_items", find=find_response, tell=input_items
        ),
    )

    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""
        content = super().error(failure)
        if failure.too_long is not None:
            tokens, longest = failure.too_long
            # OpenAI's words in streams and in other answers; clients search for both.
            content["error"]["message"] = (
                f"Your input exceeds the context window of this model. Please adjust "
                f"your input and try again. Input tokens exceed the configured limit "
                f"of {longest} tokens. Your messages resulted in {tokens} tokens."
            )
            content["error"]["param"] = "input"
        return content

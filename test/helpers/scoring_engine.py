"""An engine in this process that scores tokens with a model of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.types import Completion, TokenLayout, TokenValues


class ScoringEngine(RLSGLangEngine):
    """Answers a teacher's requests, and no others.

    Attributes:
        requests (list): all requests so far.
    """

    model_path = "scoring"
    # The methods of generation are not called.
    __abstractmethods__ = frozenset()

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.requests = model, tokenizer, []
        self.capabilities = SimpleNamespace(
            vocab_size=model.config.vocab_size,
            encodes_top_logprobs=True,
            longest_prompt=model.config.max_position_embeddings - 1,
        )

    def get_tokenizer(self, name: str | None = None) -> Any:
        return self.tokenizer

    def generate_requests(self, requests: Any, **options: Any) -> list[Completion]:
        self.requests += requests
        return [self._score(request) for request in requests]

    @torch.no_grad()
    def _score(self, request: Any) -> Completion:
        tokens = torch.tensor(list(request.input_ids))
        scores = self.model(tokens[None]).logits[0, :-1].log_softmax(-1)
        columns = {}
        for column in request.token_columns:
            values = scores.gather(-1, tokens[1:, None])[:, 0]
            if column.shape:
                top = scores.topk(column.shape[0], -1)
                values = top.values if column.dtype == "float32" else top.indices
            # The first token has none.
            unknown = values.new_full((1, *values.shape[1:]), 0).to(values.dtype)
            known = torch.cat([unknown, values])[request.columns_from :].numpy()
            layout = TokenLayout(
                name=column.name,
                dtype=column.dtype,
                shape=column.shape,
                unknown=column.unknown,
            )
            columns[column.name] = TokenValues(
                layout=layout, values=known.astype(column.dtype)
            )
        return Completion(token_ids=[], finish_reason="length", prompt_columns=columns)


ScoringEngine.__abstractmethods__ = frozenset()

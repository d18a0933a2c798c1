"""A fake server with a model that loads weights as SGLang's models do.

The custom weight loader runs in it as it does in a server, on what SGLang's route for
tensors gives it.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from aiohttp import web
from torch import nn

from helpers.fake_server import FakeServer, _json, _refusal
from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class FusedModel(nn.Module):
    """Parameters of one rank, fused and sliced as SGLang's linear layers are.

    Args:
        weights: names and tensors of a checkpoint.
        rank: this rank.
        ranks: number of ranks that share the model: each has its rows of the fused
            weights, and its columns of ``o_proj`` and ``down_proj``.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int, int, int]] = {}
        self.loads = 0
        rows: dict[str, int] = {}
        shapes: dict[str, torch.Size] = {}
        for name, value in weights.items():
            module = name.split(".")[-2]
            fused = FUSED.get(module)
            target = name.replace(module, fused) if fused else name
            column = module in ("o_proj", "down_proj") and value.dim() == 2
            dim = 1 if column else 0
            parts = ranks if fused or column else 1
            length = value.shape[dim] // parts
            start = rows.get(target, 0)
            # Which rows or columns of the tensor go where.
            self.places[name] = target, dim, start, length
            rows[target] = start + length
            shape = list(value.shape)
            shape[dim] = rows[target]
            shapes[target] = torch.Size(shape)
        dtype = next(iter(weights.values())).dtype
        self.names = {name: name.replace(".", "/") for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(
                self.names[name], nn.Parameter(torch.zeros(shape, dtype=dtype))
            )
        self.rank, self.ranks = rank, ranks

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors of a checkpoint into the parameters."""
        self.loads += 1
        parameters = dict(self.named_parameters())
        for name, value in weights:
            target, dim, start, length = self.places[name]
            first = self.rank * length if length < value.shape[dim] else 0
            own = value.narrow(dim, first, length)
            whole = parameters[self.names[target]].data
            whole.narrow(dim, start, length).copy_(own)

    def held(self, name: str) -> torch.Tensor:
        """Returns what this rank holds of a checkpoint's tensor."""
        target, dim, start, length = self.places[name]
        whole = dict(self.named_parameters())[self.names[target]].data
        return whole.narrow(dim, start, length)


class LoadingServer(FakeServer):
    """A fake server whose weights are those of a :class:`FusedModel`.

    Args:
        model_path: as for :class:`FakeServer`.
        model: the model that loads them.
    """

    def __init__(self, model_path: str, model: FusedModel, **options: Any) -> None:
        super().__init__(
            model_path,
            server_args={"custom_weight_loader": [loader.LOADER]},
            **options,
        )
        self.model = model
        own = self.routes["/update_weights_from_tensor"]

        def load(content: Any) -> web.StreamResponse:
            answer = own(content)
            if answer.status == 200:
                (entry,) = content["serialized_named_tensors"]
                tensors = pickle.load(io.BytesIO(base64.b64decode(entry)))
                if content["load_format"] is None:
                    self.model.load_weights(tensors)
                else:
                    assert content["load_format"] == loader.LOADER
                    loader.load(self.model, tensors)
            return answer

        def tell(content: Any) -> web.StreamResponse:
            try:
                answer = self.model.get_weights_by_name(content["name"], 1, tp_size=1)
            except AttributeError:
                return _refusal("Get parameter by name failed")
            return _json(answer)

        self.routes["/update_weights_from_tensor"] = load
        self.routes["/get_weights_by_name"] = tell

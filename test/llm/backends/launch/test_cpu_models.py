"""Kinds of models that SGLang's code imports kernels for, served on a plain CPU."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import aiohttp
import pytest
from helpers.tiny_models import IMAGE_TOKENS, save_tiny_moe, save_tiny_vision_model

from torchrl_sglang import make_sglang_server
from torchrl_sglang.support.event_loop import run_sync

VERSIONS = ["0.5.23", pytest.param("0.5.20", marks=pytest.mark.slow)]
PARAMS = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0.0}


def post(url: str, content: dict[str, Any]) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/generate", json=content) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await answer.json()

    return run_sync(work())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_experts_of_each_token_are_returned(version, tmp_path):
    path = save_tiny_moe(tmp_path, num_layers=2, num_experts=8)
    with make_sglang_server(
        path, device="cpu", sglang_version=version, enable_return_routed_experts=True
    ) as server:
        content = {"input_ids": [5, 6, 7], "sampling_params": PARAMS}
        answer = post(server.url, {**content, "return_routed_experts": True})
    experts = base64.b64decode(answer["meta_info"]["routed_experts"])
    found = struct.unpack(f"{len(experts) // 4}i", experts)
    # Of each token but the last, two in each layer.
    assert len(found) == (3 + 3 - 1) * 2 * 2
    assert set(found) <= set(range(8))
    assert len(set(found)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_vision_model_sees_an_image(version, tmp_path):
    from PIL import Image
    from transformers import AutoTokenizer

    path = save_tiny_vision_model(tmp_path)
    image = io.BytesIO()
    # Four patches of 14 by 14 in each direction are 2 by 2 tokens.
    Image.new("RGB", (56, 56), (200, 10, 10)).save(image, "PNG")
    shown = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
    ids = AutoTokenizer.from_pretrained(path)("".join(IMAGE_TOKENS[:3]))["input_ids"]
    with make_sglang_server(path, device="cpu", sglang_version=version) as server:
        content = {"input_ids": ids, "sampling_params": PARAMS}
        answer = post(server.url, {**content, "image_data": [shown]})
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["prompt_tokens"] == len(ids) - 1 + 4

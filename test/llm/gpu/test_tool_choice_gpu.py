"""Forced tool calls on servers with CUDA, whose XGrammar may be of another release."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from helpers.gpu import NEEDS_GPU, TOLERANCE
from helpers.log_probs import score
from helpers.tool_template import TOOL_TEMPLATE
from transformers import AutoModelForCausalLM

from torchrl_sglang import Gateway

pytestmark = NEEDS_GPU

SCHEMA = {
    "type": "object",
    # SGLang 0.5.15 takes a value without a type for a string in some formats.
    "properties": {"a": {"type": "integer", "enum": [1, 2]}},
    "required": ["a"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("add", "sub")
]
CHOICES = [
    {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
    {"tool_choice": "required", "parallel_tool_calls": False},
]

# The tokenizer has no letters beyond ASCII, which other families' formats have.
PARSERS = ("qwen25", "hermes", "qwen3_coder", "llama3", "mistral")


@pytest.mark.parametrize("parser", PARSERS)
def test_forced_tools(gpu_engine, gpu_model_path, parser):
    if not gpu_engine.capabilities.has_grammar:
        pytest.skip("the server was started without a grammar backend")
    check_forced_tools(gpu_engine, gpu_model_path, parser, TOLERANCE)


def check_forced_tools(engine, model_path, parser, tolerance):
    """Calls are parsed, and their log-probs are the model's own."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with Gateway(
        engine, chat_template=TOOL_TEMPLATE, tool_call_parser=parser
    ) as gateway:
        session = gateway.session()
        asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        with openai.OpenAI(base_url=session.base_url, api_key=session.key) as client:
            for choice in CHOICES:
                said = client.chat.completions.create(
                    **asked, tools=TOOLS, max_tokens=300, **choice
                ).choices[0]
                (call,) = said.message.tool_calls
                assert json.loads(call.function.arguments)["a"] in (1, 2)
            # Any text, without a call or with one.
            client.chat.completions.create(
                **asked, tools=TOOLS, max_tokens=8, parallel_tool_calls=False
            )
        first = session.turns[0].reply["tool_calls"][0]["function"]["name"]
        assert first == "sub"
        for turn in session.turns:
            known = score(model.eval(), turn.token_ids)[turn.prompt.num_tokens :]
            found = torch.tensor(turn.completion.log_probs)
            torch.testing.assert_close(found, known.cpu(), atol=tolerance, rtol=0)

"""A chat template with tools and reasoning, and what a model writes under it."""

from __future__ import annotations

from typing import Any

from torchrl_sglang import AsyncSGLang, Gateway

__all__ = ["ADD", "CALL", "THOUGHT", "TOOLS", "TOOL_TEMPLATE", "gateway_of"]

TOOL_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Qwen's, shortened: one token for each character is many."""

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
"""A function."""

TOOLS = [{"type": "function", "function": ADD}]
"""The same as OpenAI's tools."""

CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9]\}\}\n</tool_call>'
"""Regular expression of a call, in Qwen's format."""

THOUGHT = "<think>[a-f]{4}</think>"
"""Regular expression of reasoning."""


def gateway_of(engine: AsyncSGLang, **arguments: Any) -> Gateway:
    """Returns a gateway with the template, and parsers of what the model writes."""
    parsers = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    given = {"chat_template": TOOL_TEMPLATE, **parsers, **arguments}
    return Gateway(engine, **given)

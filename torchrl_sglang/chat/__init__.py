"""Conversations to tokens, and tokens to messages.

``choose`` selects a model's chat template. ``template`` renders a conversation, and
continues the tokens of earlier turns: the only join, for wrappers, plain functions and
gateways. ``rendered`` locates a response in a rendered conversation, ``call_forms``
determines the template's form of tool calls, ``tokens`` encodes and decodes, and
``masks`` marks the assistant's tokens.

``messages`` defines the messages of conversations, ``content`` their parts, and
``tool_calls`` a model's calls in them. It depends on tokenizers, not on tensors.
"""

"""Conversations to tokens, and tokens to messages.

``choose`` says which chat template is a model's. ``template`` renders a conversation,
and goes on from tokens that a model has read and written: the only join, for wrappers,
plain functions and gateways. ``rendered`` finds a response in what a template renders
of it, ``call_forms`` how that template wants tool calls to be written, ``tokens``
encodes and decodes, and ``masks`` tells what the assistant wrote.

``messages`` are what conversations consist of, ``content`` their parts, and
``tool_calls`` what a model called in them. Knows tokenizers, no tensors.
"""

"""Conversations to tokens, and tokens to messages.

``choose`` selects a model's chat template. ``template`` renders a conversation, and
continues the tokens of earlier turns: the only join, for wrappers, plain functions and
gateways. ``rendered`` locates a response in a rendered conversation, ``call_forms``
determines the template's form of tool calls, ``tokens`` encodes and decodes, and
``masks`` marks the assistant's tokens.

``messages`` defines the messages of conversations, ``content`` their texts, and
``tool_calls`` a model's calls in them. It depends on tokenizers, not on tensors.

Another form of messages is read in ``messages.py::read_messages``, another part, such
as an image, in ``content.py::text_of``, another format of tool calls in
``tool_calls.py::find_calls``; ``call_forms.py::CallForm`` writes calls for templates.
Forced calls of a family of models are a row of ``call_grammars.py::CALL_FORMATS``, and
of ``tool_calls.py::REASONING_MARKS`` for its reasoning.
``messages.py::conversation_keys`` decides whether a turn continues an earlier one.
``pieces.py``, ``environment.py``, ``declarations.py`` and ``repeated.py`` are for
speed.
"""

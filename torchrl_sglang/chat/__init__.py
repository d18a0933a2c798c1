"""Conversations to tokens, and tokens to messages.

``template`` renders a conversation, and goes on from tokens that a model has read and
written; ``rendered`` finds its response in what a template renders of it, and
``call_forms`` how that template wants tool calls to be written. ``messages`` are what
conversations consist of.
"""

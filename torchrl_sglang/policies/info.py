"""What the engine knows about a response beyond its tokens and log-probs."""

from __future__ import annotations

import torch
from tensordict.tensorclass import TensorClass

__all__ = ["GenerationInfo"]


class GenerationInfo(TensorClass["nocast"]):  # type: ignore[name-defined]
    """How each response came about."""

    finish_reason: str
    truncated: torch.Tensor
    cached_tokens: torch.Tensor
    weight_version: torch.Tensor
    mixed_state: torch.Tensor
    logprobs_mode: str
    top_token_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None


# TensorClass replaces a class's own docstring with its signature.
GenerationInfo.__doc__ = """How each response came about.

    Ask for it with ``SGLangWrapper(..., return_generation_info=True)``. It is written,
    too, where ``generate_kwargs={"logprobs": N}`` asks for the ``N`` likeliest tokens.

    Shapes are those of one sample; the batch's dimensions come before them, as in
    :class:`~torchrl.modules.llm.policies.Tokens`. ``Lr`` is the length of the response.

    Args:
        finish_reason (str): ``"stop"`` (a stop token or stop string) or ``"length"``.
        truncated (torch.Tensor): bool ``()``: whether it ended for its length alone.
        cached_tokens (torch.Tensor): int64 ``()``: prompt tokens whose attention state
            came from the prefix cache.
        weight_version (torch.Tensor): int64 ``(Lr,)``: version of the weights that
            generated each token, as counted by the weight-sync scheme; -1 where the
            server's version is not a number, as before the first update, and where it
            is unknown: SGLang before 0.5.20 does not say it of a response during which
            the weights were updated. Padded on the right with -1.
        mixed_state (torch.Tensor): bool ``()``: whether tokens of the later of several
            versions rest on a KV cache that older weights computed, as they do with
            ``pause_mode="in_place"``; True, too, where the versions are unknown. The
            log-probabilities that the server gave for them while it generated are
            those of no version alone. An engine object that does not send the weights
            itself tells by how often the server computed the response anew, and can
            take a response that the server put off for want of memory for a whole one.
        logprobs_mode (str): whose log-probabilities were written, of the response and
            of the likeliest tokens: ``"model"`` or ``"sampling"``; empty where none
            were.
        top_token_ids (torch.Tensor, optional): int64 ``(Lr, N)``: the ``N`` likeliest
            tokens in the place of each one, the likeliest first, if they were asked
            for. Padded on the right with -1.
        top_log_probs (torch.Tensor, optional): float32 ``(Lr, N)``: their
            log-probabilities. Padded on the right with 0.0.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules.llm.policies import Text
        >>> policy = SGLangWrapper(
        ...     engine,
        ...     input_mode="text",
        ...     generate_kwargs={"max_new_tokens": 2, "ignore_eos": True},
        ...     return_generation_info=True,
        ... )
        >>> prompt = Text(prompt=["Hi"], batch_size=1)
        >>> info = policy(TensorDict(text=prompt, batch_size=1))["generation_info"]
        >>> list(info.finish_reason), info.truncated.tolist()
        (['length'], [True])
    """

"""What servers that draft tokens do not sample as others do.

Source: ``eagle_sample`` in ``sglang/srt/speculative/eagle_utils.py`` (SGLang 0.5.15 to
0.5.23), which verifies drafts, and draws what follows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import ServerCapabilities


def check_speculation(
    params: Mapping[str, Any],
    temperature: float | None,
    capabilities: ServerCapabilities,
    ignored: Mapping[str, Any],
) -> None:
    """Checks that what is sampled behind drafts is what a request asks for.

    Args:
        params: sampling parameters of a request, under SGLang's names.
        temperature: that the server samples with.
        capabilities: of the server.
        ignored: filters that are not applied behind drafts, and their values.

    Raises:
        UnsupportedByServerError: naming what else works.
    """
    # Greedy sampling draws nothing, and the first token follows no draft.
    if not capabilities.speculates or temperature == 0:
        return
    if params.get("max_new_tokens") in (0, 1):
        return
    for name, value in ignored.items():
        raise UnsupportedByServerError(
            f"{name}={value!r} would be ignored: SGLang applies top_k and top_p alone "
            f"where it verifies drafts (speculative_algorithm). Leave it out, or start "
            f"the servers without speculative decoding."
        )
    args = capabilities.args
    for name in ("single", "acc"):
        threshold = getattr(args, f"speculative_accept_threshold_{name}")
        if threshold != 1:
            raise UnsupportedByServerError(
                f"temperature={temperature!r} would give other samples than the "
                f"model's: the servers accept drafts that it finds less likely "
                f"(speculative_accept_threshold_{name}={threshold!r}). Start them with "
                f"1.0, or sample with temperature=0."
            )
    if capabilities.biased_drafts:
        raise UnsupportedByServerError(
            f"temperature={temperature!r} would sample token 0 too often: SGLang's "
            f"n-gram drafts (speculative_algorithm='NGRAM') fill places that have no "
            f"draft with it. Start the servers without speculative decoding or with "
            f"another algorithm, or sample with temperature=0."
        )

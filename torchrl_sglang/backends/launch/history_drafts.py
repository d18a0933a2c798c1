"""Servers that take drafts of the next tokens from texts that they are given.

It is SGLang's speculative decoding by n-grams (``--speculative-algorithm NGRAM``) with
an external corpus, whose longest continuations are verified in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, check_positive
from torchrl_sglang.types import HistoryDrafts

_SET = (
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_ngram_external_sam_budget",
    "speculative_ngram_max_bfs_breadth",
)
"""Arguments of a server that ``drafts`` sets."""

MOST_TOKENS = 4_500_000
"""Most tokens of the texts. The new ones are added before the old ones are removed, and
a server holds 10 million."""

NO_DRAFT_TEXTS = (
    "drafts='history' needs servers that take drafts from texts: start them with "
    "from_pretrained(drafts='history'), or with --speculative-algorithm NGRAM, "
    "--speculative-num-draft-tokens 8 --speculative-ngram-external-sam-budget 7 "
    "--speculative-ngram-max-bfs-breadth 1, and a tokenizer; or leave drafts out."
)


def to_history_drafts(drafts: object) -> HistoryDrafts | None:
    """Returns an argument ``drafts``, checked.

    Raises:
        ConfigurationError: if it is something else.
    """
    if drafts is None:
        return None
    if drafts == "history":
        return HistoryDrafts()
    if not isinstance(drafts, HistoryDrafts):
        raise ConfigurationError(
            f"drafts={drafts!r} is not 'history' or a HistoryDrafts(...); for a draft "
            f"model, give SGLang's speculative_algorithm and the like."
        )
    check_count("num_tokens", drafts.num_tokens, least=2)
    if check_count("max_tokens", drafts.max_tokens) > MOST_TOKENS:
        raise ConfigurationError(
            f"max_tokens={drafts.max_tokens} is more than a server takes; give at most "
            f"{MOST_TOKENS}."
        )
    check_positive("least_length", drafts.least_length)
    return drafts


def history_arguments(
    drafts: HistoryDrafts, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of servers with these drafts.

    Args:
        drafts: what was asked for.
        given: arguments of the servers, under SGLang's names.

    Raises:
        ConfigurationError: if an argument does not go with it.
    """
    for name in _SET:
        if given.get(name) is not None:
            raise ConfigurationError(
                f"{name}={given[name]!r} does not go with drafts, which sets it; leave "
                f"one of the two out, or give HistoryDrafts(num_tokens=...)."
            )
    if given.get("skip_tokenizer_init"):
        raise ConfigurationError(
            "drafts='history' needs servers with a tokenizer, because SGLang takes "
            "texts; leave skip_tokenizer_init out."
        )
    # One chain of tokens: what is behind the longest text that ends as the response
    # does now. The last place of a pass is the token that is not drafted.
    values = ("NGRAM", drafts.num_tokens, drafts.num_tokens - 1, 1)
    return dict(zip(_SET, values, strict=True))

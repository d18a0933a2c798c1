"""Publishes a session that takes no more turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.observer import (
    GROUP_IDS,
    GroupEnded,
    GroupStarted,
    Publisher,
    ResponseRecord,
    RowRecord,
    TurnRecord,
)
from torchrl_sglang.types import Completion

Spans = Callable[[Completion], Iterable[tuple[int, int]]]
"""Returns version and number of tokens of each part of a response."""


def record_session(session: Session, spans: Spans) -> ResponseRecord:
    """Returns the tree of turns of a session."""
    paths = session.trajectories()
    values = [path.reward for path in paths if path.reward is not None]
    return ResponseRecord(
        turns=[
            TurnRecord(
                messages=list(turn.prompt.new_messages)
                or [{"role": "user", "content": turn.prompt.new_text or ""}],
                reply=turn.reply,
                completion=turn.completion,
                spans=list(spans(turn.completion)),
                prompt_tokens=turn.prompt.num_tokens,
                number=turn.number,
                parent=turn.prompt.parent,
                branch="" if turn.branch is None else turn.branch.text,
                end=turn.created,
                reward=turn.reward,
                is_trained=session.is_trained(turn),
            )
            for turn in session.turns
        ],
        rows=[
            RowRecord(
                tokens=[path.token_ids],
                turns=[turn.number for turn in path.turns],
                reward=path.reward,
            )
            for path in paths
        ],
        reward=sum(values) / len(values) if values else None,
    )


def publish_session(publish: Publisher, session: Session, tokenizer: object) -> None:
    """Publishes a session that takes no more turns, unless it has none."""
    if not session.turns:
        return
    snapshot, number = session.snapshot(), next(GROUP_IDS)
    group = GroupStarted(
        id=number, position=number, name=snapshot.name, start=snapshot.created
    )
    publish(group)
    spans = (span for turn in snapshot.turns for span in served_spans(turn.completion))
    versions = [version for version, _ in spans]
    publish(
        GroupEnded(
            group=group,
            responses=lambda: [record_session(snapshot, served_spans)],
            tokens=snapshot.num_tokens,
            tokenizer=tokenizer,
            versions=(min(versions), max(versions)),
            status="session",
        )
    )


def served_spans(completion: Completion) -> list[tuple[int, int]]:
    """Returns versions as the servers name them; those without a number are -1."""
    if not completion.versions:
        served = completion.weight_version or ""
        return [(version_order(served), len(completion.token_ids))]
    return [
        (version_order(span.version), span.end - span.start)
        for span in completion.versions
    ]

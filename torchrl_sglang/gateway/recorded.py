"""What a recorder writes of a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torchrl_sglang.gateway.session import Session
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.recording.records import (
    GroupRecord,
    ResponseRecord,
    TurnRecord,
    row_key,
)
from torchrl_sglang.types import Completion

Spans = Callable[[Completion], Iterable[tuple[int, int]]]
"""Returns version and number of tokens of each part of a response."""


def record_session(session: Session, spans: Spans) -> ResponseRecord:
    """Returns what is written of a session: its tree of turns."""
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
                ended=turn.created,
                reward=turn.reward,
                is_trained=session.is_trained(turn),
            )
            for turn in session.turns
        ],
        keys=[row_key(path.token_ids) for path in paths],
        reward=sum(values) / len(values) if values else None,
    )


def tell_session(recorder: RunRecorder, session: Session, tokenizer: object) -> None:
    """Has a session written that takes no more turns; one without any is not."""
    if not session.turns:
        return
    number, ended = recorder.next_id(), time.time()
    snapshot = session.snapshot()

    def make() -> GroupRecord:
        record = record_session(snapshot, served_spans)
        versions = [version for turn in record.turns for version, _ in turn.spans]
        return GroupRecord(
            id=number,
            position=number,
            name=snapshot.name,
            began=snapshot.created,
            ended=ended,
            status="session",
            versions=(min(versions, default=0), max(versions, default=0)),
            responses=[record],
        )

    recorder.event("began", id=number, position=number)
    recorder.group(make, tokenizer, 1 + snapshot.num_tokens)


def served_spans(completion: Completion) -> list[tuple[int, int]]:
    """Returns versions as the servers name them; those without a number are 0."""
    if not completion.versions:
        served = completion.weight_version or ""
        return [(_number(served), len(completion.token_ids))]
    return [
        (_number(span.version), span.end - span.start) for span in completion.versions
    ]


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0

"""The log-probs that all ranks of a trainer have, for the first one's recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.recording.recorder import RunRecorder, scores_of
from torchrl_sglang.recording.records import Scores
from torchrl_sglang.trainers.ranks import TrainerRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankScores:
    """Collects the log-probs of all ranks' learners for the recorder.

    Only the first rank writes, so that the bound on the recording, and the order of
    what is in it, equal one process's.
    """

    recorder: RunRecorder | None
    """The first rank's; ``None`` on the others."""
    ranks: TrainerRanks

    def scored(self, parts: Sequence[tuple[Any, Any]]) -> None:
        """Has the first rank record the log-probs of all; all of them call this."""
        scores: Scores | Exception | None = None
        if self.recorder is None:
            try:
                scores = scores_of(parts)
            except Exception as error:  # noqa: BLE001 - Its record is all that fails.
                # Another object, such as of the user's, may not be sent.
                scores = RuntimeError(f"{type(error).__name__}: {error}")
        gathered = self.ranks.gather_first(scores)
        if self.recorder is not None:
            # Its own are read in the recorder's thread.
            self.recorder.scored(parts)
            for part in gathered:
                if part is not None:
                    self.recorder.scored_elsewhere(part)

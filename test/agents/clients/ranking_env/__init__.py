"""An environment of verifiers.v1 whose rubric ranks the attempts at a task."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.envs.best_of_n import BestOfNEnv

__all__ = ["RankingEnv"]


class RankingEnv(BestOfNEnv):
    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Replaces rewards by ranks between -1 and 1, whose sum is 0."""
        ordered = sorted(episode.traces, key=lambda trace: trace.reward)
        for rank, trace in enumerate(ordered):
            trace.record_metric("own", trace.reward)
            trace.rewards.clear()
            trace.record_reward("rank", 2 * rank / (len(ordered) - 1) - 1)

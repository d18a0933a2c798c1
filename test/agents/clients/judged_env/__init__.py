"""An environment of verifiers.v1 with two roles, of which some tasks need one."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["JudgedEnv"]


class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class JudgedEnv(vf.Env[JudgedConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.solver.run(task)
        if "Rome" in task.data.prompt:
            await agents.judge.run(task)

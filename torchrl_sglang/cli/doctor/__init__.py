"""``doctor``: what on this machine keeps a run from working, and what to do about it.

``gather.py`` finds facts, ``software.py`` and ``machine.py`` judge them, and this
prints what they say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from torchrl_sglang.cli.doctor.facts import Facts
from torchrl_sglang.cli.doctor.findings import Finding
from torchrl_sglang.cli.doctor.machine import (
    judge_gpus,
    judge_nccl,
    judge_ports,
    judge_processes,
    judge_proxies,
    judge_system,
)
from torchrl_sglang.cli.doctor.software import (
    judge_engine,
    judge_model,
    judge_trainer,
)
from torchrl_sglang.cli.parser import Parser

__all__ = ["add_command", "judge"]

DESCRIPTION = """\
Looks at this Python and its packages, SGLang's Python, GPUs, settings of NCCL, the
network, limits of the system, servers that are left over, and a model's folder. Nothing
is started but an interpreter, and nothing is changed.

Each line is ok, a warning or a problem, and says what to do. The exit status is 1 if
there is a problem, and 0 otherwise."""

EPILOG = """\
examples:
  python -m torchrl_sglang doctor
  python -m torchrl_sglang doctor --model ./model --json"""


def add_command(commands: Any) -> Parser:
    """Adds the command to those of a parser, and returns its own."""
    parser: Parser = commands.add_parser(
        "doctor",
        help="check this machine, its environments and a model",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--model", metavar="PATH", help="folder or hub name to check")
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter that has SGLang (default: the one that a server would take)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="what servers shall run on (default: cuda where there is a GPU)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings."""
    # It imports what may be broken.
    from torchrl_sglang.cli.doctor.gather import gather

    findings = judge(
        gather(model=arguments.model, python=arguments.python, device=arguments.device)
    )
    problems = sum(finding.level == "problem" for finding in findings)
    if arguments.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not problems, "findings": rows}, indent=2))
    else:
        print("\n".join(to_lines(findings)))
        warnings = sum(finding.level == "warning" for finding in findings)
        print(f"{problems} problems, {warnings} warnings.", file=sys.stderr)
    return 1 if problems else 0


def judge(facts: Facts) -> list[Finding]:
    """Returns everything that is to be said about a machine. Pure."""
    device = facts.engine.device
    findings = [
        *judge_trainer(facts.trainer),
        *judge_engine(facts.engine),
        *judge_gpus(facts.gpus, device),
        *judge_nccl(facts.system, facts.gpus.visible),
        *judge_ports(facts.system),
        *judge_proxies(facts.system.environment),
        *judge_system(facts.system, device),
        *judge_processes(facts.system),
    ]
    if facts.model is not None:
        findings += judge_model(facts.model, facts.gpus, facts.system, device)
    return findings


def to_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns one line for each finding. Pure."""
    width = max((len(finding.check) for finding in findings), default=0)
    return [
        " ".join(
            f"{finding.level:7}  {finding.check:{width}}  {finding.message} "
            f"{finding.remedy}".split("\n")
        ).rstrip()
        for finding in findings
    ]

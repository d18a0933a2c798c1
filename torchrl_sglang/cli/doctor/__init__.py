"""``doctor``: checks a machine or a cluster, and prints remedies.

``checks.py`` has the checks of a machine and ``machine.py`` the facts for several of
them; ``ray_cluster.py`` runs them on each node and compares the nodes.

A check is a function and its row in ``checks.py::CHECKS`` or
``ray_cluster.py::CLUSTER_CHECKS``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.options import Parser

if TYPE_CHECKING:
    from torchrl_sglang.cli.doctor.checks import Finding

DESCRIPTION = """\
Checks this Python and its packages, SGLang's Python, GPUs, variables of NCCL, the
network, limits of the system, servers that are left over, and a model's folder. It
changes nothing.

With --ray, it checks a Ray cluster instead: each node as it would this machine, whether
the versions on all nodes are the same, and whether each node reaches the others.

Each line is ok, a warning or a problem, and says what to do. The exit status is 1 if
there is a problem, and 0 otherwise."""

EPILOG = """\
examples:
  %(prog)s
  %(prog)s --model ./model --json
  %(prog)s --ray --model /shared/model"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "doctor",
        help="check this machine, its environments and a model",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="folder or hub name to check")
    text = "interpreter that has SGLang (default: the one that a server would use)"
    add("--python", metavar="PATH", help=text)
    text = "where servers shall run (default: cuda where there is a GPU)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = "check a Ray cluster (default: the one that RAY_ADDRESS names, or is here)"
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings."""
    options = {name: getattr(arguments, name) for name in ("model", "python", "device")}
    findings = _find(arguments.ray, options)
    counts = Counter(finding.level for finding in findings)
    if arguments.json:
        rows = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not counts["problem"], "findings": rows}, indent=2))
    else:
        print("\n".join(to_lines(findings)))
        numbers = [(counts[level], level) for level in ("problem", "warning")]
        texts = [f"{count} {level}{'s' * (count != 1)}" for count, level in numbers]
        print(f"{', '.join(texts)}.", file=sys.stderr)
    return 1 if counts["problem"] else 0


def _find(address: str | None, options: dict[str, str | None]) -> list[Finding]:
    from torchrl_sglang.cli.doctor.checks import CHECKS, run_checks
    from torchrl_sglang.cli.doctor.machine import Machine

    if address is None:
        return run_checks(CHECKS, Machine.here(**options))
    from torchrl_sglang.cli.doctor.ray_cluster import CLUSTER_CHECKS, look_at_cluster

    return run_checks(CLUSTER_CHECKS, look_at_cluster(address, **options))


def to_lines(findings: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns one line for each finding."""
    width = max((len(check) for _, check, *_ in findings), default=0)
    return [
        " ".join([f"{level:7}  {check:{width}} ", *text]).replace("\n", " ").rstrip()
        for level, check, *text in findings
    ]

"""Processor time that opening a run takes: of the viewer, and of its page in a browser.

``python benchmarks/viewer.py --responses 100000``. It makes a recording, starts
``torchrl-sglang view`` and opens the page in Chromium, if there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test"))

from shutil import which  # noqa: E402

from helpers.browser import NAMES, open_browser  # noqa: E402
from helpers.recorded_runs import Recorded  # noqa: E402

GROUP_SIZE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=8, help="groups of a batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        run = Recorded(folder, size=GROUP_SIZE, groups=options.groups, texts=False)
        for _ in range(options.responses // (GROUP_SIZE * options.groups)):
            run.step()
        run.close()
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{options.responses:,} responses, {size / 1e6:.0f} MB")
        measure(folder, Path(name, "browser"))


def measure(folder: Path, profile: Path) -> None:
    """Opens a run, and prints what it took."""
    command = [sys.executable, "-m", "torchrl_sglang", "view", str(folder)]
    with subprocess.Popen(
        [*command, "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as viewer:
        assert viewer.stdout is not None
        try:
            url = viewer.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=600) as answer:
                page = answer.read()
            print(f"viewer: {processor_seconds(viewer.pid):.2f} s, imports included")
            print(f"page: {len(page) / 1e6:.1f} MB")
            if any(map(which, NAMES)):
                with open_browser(profile) as browser:
                    browser.look()
                    browser.call("Performance.enable")
                    browser.open(url)
                    found = browser.call("Performance.getMetrics")["metrics"]
                seconds = {each["name"]: each["value"] for each in found}
                print(f"browser: {seconds['TaskDuration']:.2f} s")
        finally:
            viewer.terminate()


def processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

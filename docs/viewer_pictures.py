"""Makes the pictures of the guide on seeing a run, of a run that was recorded.

torchrl-sglang demo --output runs/demo
python docs/viewer_pictures.py runs/demo
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test"))

from helpers.browser import open_browser  # noqa: E402

from torchrl_sglang.recording.reading import Recording  # noqa: E402
from torchrl_sglang.viewer.page import self_contained  # noqa: E402

IMAGES = ROOT / "docs" / "source" / "images"


def main() -> None:
    recordings = [Recording.open(sys.argv[1])]
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as page:
        file = Path(folder) / "run.html"
        file.write_text(self_contained(recordings, now=time.time()), encoding="utf-8")
        page.look(width=1280, height=1000)
        page.open(file.as_uri())
        for chart in page.eval(
            "[...document.querySelectorAll('.chart')].map(b => b.id)"
        ):
            page.eval(f"document.getElementById('{chart}').scrollIntoView()")
            page.wait(f"document.getElementById('{chart}').querySelector('svg')")
        page.eval("window.scrollTo(0, 0)")
        page.screenshot(IMAGES / "viewer_overview.png", full=False)
        page.look(width=1280, height=1000, dark=True)
        page.eval("document.querySelector('#table tbody tr').click()")
        page.wait("document.querySelector('.strip')")
        page.eval("document.querySelector('.strip').focus()")
        page.press("Home")
        page.eval("document.getElementById('group').scrollIntoView()")
        page.screenshot(IMAGES / "viewer_tokens.png", full=False)


if __name__ == "__main__":
    main()

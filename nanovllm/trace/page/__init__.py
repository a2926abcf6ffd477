"""The page that replays a recording: one HTML file that needs no network, or one that watches a running engine.

    page.html = style + script + <script type="application/json" id="recording"></script>
                                                        render: the recording goes here
                                                        render_live: data-live="/events" goes into the tag

page.html is built from web/, see docs/page.md; a test holds that it is what the sources there build.
"""

import html
import json
import re
from importlib.resources import files
from typing import Any

OPENING, CLOSING = '<script type="application/json" id="recording"', "></script>"


def render(recording: dict[str, Any]) -> str:
    """Return the page that replays a recording. Nothing in its texts can end the script that holds it.

    Raises ValueError if a number is infinite or none: JSON has no word for it.
    """
    text = json.dumps(recording, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # half a surrogate pair, as a token alone can be, has no UTF-8
    text = re.sub("[<\ud800-\udfff]", lambda found: f"\\u{ord(found.group()):04x}", text)
    return _fill(f">{text}</script>")


def render_live(events: str = "/events") -> str:
    """Return the page that watches a running engine: it reads server-sent events from there.

    web/src/live.ts says what the messages are.
    """
    return _fill(f' data-live="{html.escape(events)}"{CLOSING}')


def _fill(tag: str) -> str:
    page = files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    before, opening, after = page.partition(OPENING + CLOSING)
    assert opening, "the page has lost the place of its recording"
    return f"{before}{OPENING}{tag}{after}"

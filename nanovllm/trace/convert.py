"""``nanovllm page``: a recording as the page to watch it on."""

import argparse
from pathlib import Path

from nanovllm.trace import recording
from nanovllm.trace.page import render
from nanovllm.trace.recording import TraceError, replace


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises TraceError for a file that is no recording, and for a place that cannot be written to."""
    target = Path(args.output)
    if target.suffix != ".html":
        raise TraceError(f"the page's file is {args.output!r}; it must end in .html.")
    page = render(recording.load(args.file))
    try:
        replace(target, page)
    except OSError as error:
        raise TraceError(f"{target} cannot be written ({error}); take another place.") from error
    print(target)
    return 0

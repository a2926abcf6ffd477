"""A process that is started to be timed: import, load, one token, and the time at which each was reached.

    python -m nanovllm.cli.first_token MODEL '{"load_format": "dummy"}'

Prints one line of JSON, in seconds since the epoch: the parent knows when it started the process.
"""

import json
import sys
import time
from importlib import import_module

from nanovllm import SamplingParams


def main(model: str, options: str) -> None:
    """Reach the first token, then say when that was, and when what lies before it."""
    reached = {"python": time.time()}
    llm_class = import_module("nanovllm.llm").LLM
    reached["import"] = time.time()
    with llm_class(model, **json.loads(options)) as llm:
        reached["load"] = time.time()
        llm.generate([[0] * 8], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        reached["first_token"] = time.time()
    print(json.dumps(reached))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A list of prompts, one machine, all answers. Usage: python examples/offline.py [MODEL]"""

import sys

from nanovllm import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    prompts = [f"{number} times {number} is" for number in range(2, 10)]
    with LLM(model) as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
            print(f"{output.prompt!r} -> {output.text!r}")


if __name__ == "__main__":
    main()

"""Drive the engine yourself: requests join, others leave. Usage: python examples/step_by_step.py [MODEL]"""

import sys

from nanovllm import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    with LLM(model) as llm:
        engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
        params = SamplingParams(temperature=0, max_tokens=12)
        engine.add_request("first", tokenizer.encode("The capital of France is"), params, stream=True)
        step = 0
        while engine.has_unfinished_requests:
            for output in engine.step():
                state = "done" if output.finished else "goes on"
                print(f"step {step}: {output.request_id:6s} {output.text!r} ({state})")
            step += 1
            if step == 4:  # others may join at any time, and leave
                engine.add_request("second", tokenizer.encode("One, two, three,"), params, stream=True)
            if step == 8:
                engine.abort("second")
                print("second was stopped")


if __name__ == "__main__":
    main()

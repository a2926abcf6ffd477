"""Many callers at once, one engine, and one who gives up. Usage: python examples/many_readers.py [MODEL]"""

import asyncio
import sys

from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, output_kind=RequestOutputKind.DELTA)


async def read(llm: AsyncLLM, prompt: str) -> None:
    text = "".join([piece.text async for piece in llm.generate(prompt, PARAMS)])
    print(f"{prompt!r} -> {text!r}")


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    async with AsyncLLM(model) as llm:
        readers = [asyncio.create_task(read(llm, f"{number} times {number} is")) for number in range(2, 6)]
        impatient = asyncio.create_task(read(llm, "Tell me everything:"))
        await asyncio.sleep(0.1)
        impatient.cancel()  # its request ends, and its blocks are free again
        await asyncio.gather(*readers)


if __name__ == "__main__":
    asyncio.run(main())

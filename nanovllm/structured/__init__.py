"""Structured output: a request whose text must follow a JSON schema, a regular expression, a list or a grammar.

    params.py    what a request may ask for
    compiler.py  (what it asks for, tokenizer) -> grammar, checked and cached, before the request is admitted
    matcher.py   grammar + the tokens so far -> the tokens that may come next, as a mask on the logits

The grammars are llguidance's (https://github.com/guidance-ai/llguidance), which is loaded with the first such request.
"""

from nanovllm.structured.params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]

"""A real tokenizer, in which a token is most of a word or half a character, and a real model."""

import json
import re
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
        "sights": {"type": "array", "items": {"enum": ["tower", "köprü", "城"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "population", "sights"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_a_model_under_four_grammars_beside_a_free_request(smollm2_path: Path) -> None:
    forms = [
        dict(json=SCHEMA, disable_any_whitespace=True),
        dict(regex=r"[A-Z][a-z]{2,8}, [0-9]{4}"),
        dict(choice=["Paris", "Paris, France", "東京", "Köln 😀"]),
        dict(grammar='start: "The " NAME " is " ADJECTIVE "."\nNAME: /[a-z]{3,7}/\nADJECTIVE: "big" | "old"'),
    ]
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(**form))
        for form in forms
    ]
    free = SamplingParams(temperature=0.0, max_tokens=12)
    prompt = "Facts about the capital of France: "
    with LLM(smollm2_path, dtype="float32", use_tqdm_on_load=False) as llm:
        (alone,) = llm.generate(prompt, free, use_tqdm=False)
        *outputs, beside = llm.generate([prompt] * 5, [*params, free], use_tqdm=False)
    assert beside.token_ids == alone.token_ids
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    person, date, choice, sentence = (output.text for output in outputs)
    found = json.loads(person)
    assert list(found) == SCHEMA["required"] and set(found["sights"]) <= {"tower", "köprü", "城"}
    assert re.fullmatch(r"[A-Z][a-z]{2,8}, [0-9]{4}", date)
    assert choice in forms[2]["choice"]
    assert re.fullmatch("The [a-z]{3,7} is (big|old)\\.", sentence)

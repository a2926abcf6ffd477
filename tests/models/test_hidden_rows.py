"""Where only some hidden states are wanted, the last layer computes those alone, and they are the same."""

import pytest
import torch

from nanovllm.batch import Drawn, build_batch
from nanovllm.kv_cache import KVCache
from nanovllm.ops.attention import find_backend
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput, Span

CPU = torch.device("cpu")
NAMES = ("LlamaConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig")


def requests():
    made = [Request(request_id=str(number), prompt_token_ids=[(7 * number + place) % 131 for place in range(30)],
                    params=SamplingParams(), max_tokens=1, arrival=number) for number in range(3)]  # fmt: skip
    for number, request in enumerate(made):
        request.block_ids = [3 * number + 1, 3 * number, 3 * number + 2]
    return made


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_wanted_rows_are_those_of_the_whole(name, kit, tmp_path):
    kit.make_reference(name).save_pretrained(tmp_path)
    ours = kit.load_ours(tmp_path)
    rows = []
    mlp = ours.model.model.layers[-1].mlp
    mlp.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[-2]))
    first, second, third = requests()
    steps = (
        [Span(first, 0, 12, False), Span(second, 0, 30, True), Span(third, 0, 7, False)],
        [Span(first, 12, 30, True), Span(third, 7, 8, False)],
        [Span(third, 8, 29, False)],
        [Span(third, 29, 30, True)],
    )
    wanted, found = [], []
    for all_hidden in (True, False):
        cache = KVCache.allocate(ours.config, 9, 16, torch.float32, CPU)
        for spans in steps:
            batch = build_batch(
                SchedulerOutput(tuple(spans)), 16, find_backend("auto", "cpu"), Drawn(1, CPU), all_hidden=all_hidden
            )
            hidden = ours.model(batch, cache)
            if all_hidden:
                wanted.append(hidden[batch.sample_rows])
            else:
                found.append(hidden if any(span.samples for span in spans) else hidden[:0])
    assert rows == [49, 19, 21, 1, 1, 1, 1, 1], "one row where none is wanted: nothing has to work on no rows"
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)

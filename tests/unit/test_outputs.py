"""Results: vLLM's attributes, nano-vllm's items, and what a caller may do with them."""

import copy
import pickle
from collections.abc import Mapping

import pytest

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


def example():
    return RequestOutput(
        request_id="7",
        prompt="Hello",
        prompt_token_ids=[1, 2],
        outputs=[
            CompletionOutput(
                index=0,
                text=" world",
                token_ids=[3, 4],
                cumulative_logprob=-1.5,
                logprobs=[{3: Logprob(-0.5, 1, " wor")}, {4: Logprob(-1.0, 2, "ld")}],
                finish_reason="stop",
                stop_reason=4,
            )
        ],
        finished=True,
        num_cached_tokens=1,
    )


def test_attributes_are_those_of_vllm():
    out = example()
    assert (out.request_id, out.prompt, out.prompt_token_ids, out.finished) == ("7", "Hello", [1, 2], True)
    assert out.num_cached_tokens == 1
    completion = out.outputs[0]
    assert (completion.index, completion.text, completion.token_ids) == (0, " world", [3, 4])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 4)
    assert completion.logprobs[1][4].rank == 2 and completion.cumulative_logprob == -1.5


def test_finished_is_a_method_of_a_completion_as_in_vllm():
    completion = CompletionOutput(index=0, text="", token_ids=[])
    assert not completion.finished()
    completion.finish_reason = "length"
    assert completion.finished()


def test_the_items_are_those_of_nano_vllm():
    out = example()
    assert out["text"] == out.text == " world"
    assert out["token_ids"] == out.token_ids == [3, 4]
    assert dict(out) == {"prompt": "Hello", "text": " world", "token_ids": [3, 4], "finished": True} == {**out}
    assert list(out) == list(out.keys()) == ["prompt", "text", "token_ids", "finished"] and len(out) == 4
    assert "text" in out and "logprobs" not in out and 3 not in out


@pytest.mark.parametrize("key", ["texts", "outputs", "keys", "__class__", 0])
def test_there_are_no_other_items(key):
    with pytest.raises(KeyError, match="the items are prompt, text, token_ids, finished"):
        example()[key]
    assert key not in example()


def test_the_view_is_read_only_and_an_output_is_no_mapping_class():
    out = example()
    with pytest.raises(TypeError):
        out["text"] = "other"
    with pytest.raises(TypeError):
        del out["text"]
    assert not isinstance(out, Mapping)
    with pytest.raises(AttributeError):
        out.texts = "misspelt"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_gives_an_equal_object(protocol):
    out = example()
    again = pickle.loads(pickle.dumps(out, protocol))
    assert again == out and again is not out
    assert again.outputs[0].logprobs[0][3].decoded_token == " wor"


def test_copies_are_equal_and_a_deep_one_shares_nothing():
    out = example()
    assert copy.copy(out) == out == copy.deepcopy(out)
    deep = copy.deepcopy(out)
    deep.outputs[0].token_ids.append(5)
    assert out.token_ids == [3, 4] and out != deep


def test_defaults_are_not_shared():
    first, second = (RequestOutput(request_id="a", prompt=None, prompt_token_ids=[]) for _ in range(2))
    first.outputs.append(CompletionOutput(index=0, text="", token_ids=[]))
    assert second.outputs == []


def test_a_logprob_is_a_value():
    entry = Logprob(-0.25)
    assert (entry.rank, entry.decoded_token) == (None, None) and entry == Logprob(-0.25)
    assert entry != Logprob(-0.25, rank=1)
    with pytest.raises(AttributeError):
        entry.logprobs = 0.0

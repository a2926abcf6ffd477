"""Results: vLLM's attributes, nano-vllm's items, and what a caller may do with them."""

import copy
import pickle
from collections.abc import Mapping

import pytest

from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput


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


class Step:
    """One step's figures: row i drew token 10 * i."""

    def __init__(self, shift=0.0):
        self.shift = shift
        self.read = []

    def entry(self, row):
        self.read.append(row)
        return {10 * row: Logprob(self.own(row), 1), 7: Logprob(-5.0, 2)}

    def own(self, row):
        return -0.5 * row - self.shift


def listed(decode=str):
    """Three tokens of a request that was in rows 1, 0 and 2 of its steps, lazily and as the list it stands for."""
    lazy = Logprobs(decode=decode)
    for step, row in ((Step(), 1), (Step(1.0), 0), (Step(), 2)):
        lazy.append(step, row)
    text = (lambda token: None) if decode is None else decode
    plain = [
        {10 * row: Logprob(own, 1, text(10 * row)), 7: Logprob(-5.0, 2, text(7))}
        for row, own in ((1, -0.5), (0, -1.0), (2, -1.0))
    ]
    return lazy, plain


@pytest.mark.parametrize("decode", [str, None])
def test_lazy_logprobs_read_like_their_list(decode):
    lazy, plain = listed(decode)
    assert lazy == plain and plain == lazy and lazy == lazy[:]
    assert list(lazy) == plain and len(lazy) == 3 and bool(lazy) and not Logprobs()
    assert [lazy[place] for place in (0, 2, -1, -3)] == [plain[place] for place in (0, 2, -1, -3)]
    for part in (slice(1, None), slice(None, -1), slice(None, None, -1), slice(0, 3, 2), slice(5, 9)):
        assert lazy[part] == plain[part] and isinstance(lazy[part], Logprobs)
    assert lazy + plain == plain + lazy == lazy + lazy == plain + plain
    assert repr(lazy) == repr(plain)
    assert plain[1] in lazy and {} not in lazy and lazy.index(plain[2]) == 2 and list(reversed(lazy)) == plain[::-1]
    assert lazy != plain[:2] and lazy != plain[::-1] and lazy != 3 and lazy != tuple(plain)
    for place in (3, -4):
        with pytest.raises(IndexError):
            lazy[place]
    with pytest.raises(TypeError):
        hash(lazy)


def test_lazy_logprobs_are_added_up_and_cut():
    lazy, plain = listed()
    assert lazy.total() == sum(next(iter(entry.values())).logprob for entry in plain) == -2.5
    later = lazy.since(1, lambda token: f"<{token}>")
    assert len(later) == 2 and later[1][20].decoded_token == "<20>" and lazy[2][20].decoded_token == "20"
    lazy.append(Step(), 4)
    assert len(later) == 2, "what was given out does not grow"


def test_lazy_logprobs_make_nothing_before_they_are_read():
    step = Step()
    lazy = Logprobs([step, step], [3, 4], lambda token: pytest.fail("decoded"))
    assert len(lazy.since(1, None)) == 1 and lazy.total() == -3.5 and step.read == []
    lazy = Logprobs([step, step], [3, 4])
    assert lazy[-1][40].decoded_token is None and step.read == [4]


def test_a_reading_changes_nothing():
    lazy, plain = listed()
    lazy[0][10].logprob = 1.0
    lazy[0].clear()
    assert lazy == plain


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_lazy_logprobs_are_pickled_and_copied_as_a_list(protocol):
    lazy, plain = listed(lambda token: f"<{token}>")  # which no pickle could hold
    out = example()
    out.outputs[0].logprobs = lazy
    for again in (pickle.loads(pickle.dumps(out, protocol)), copy.deepcopy(out)):
        assert again == out and again.outputs[0].logprobs == plain and type(again.outputs[0].logprobs) is list

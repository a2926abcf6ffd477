"""Tokens to text, one by one, with stop strings.

The law: what comes out depends on the text alone, not on how it was cut into tokens. The oracle decodes all bytes at
once and cuts at the stop string that is complete first.
"""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import MAX_PENDING, Detokenizer, TokenizerParts
from nanovllm.tokenizer import Tokenizer as OurTokenizer

QUICK = settings(max_examples=300, deadline=None, derandomize=True, database=None)


class Pieces:
    """A tokenizer whose token ``i`` is the bytes ``pieces[i]``; counts what it decodes."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.decoded += len(token_ids)
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", errors="replace")


def cut(data, places):
    """Cut bytes at places; no piece is empty."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:stop] for start, stop in pairwise(edges)]


def feed(tokenizer, tokens, **params):
    """Push tokens until a stop string is found; return (text, stop, what ``since`` gave after each token)."""
    builder = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    streamed, sent, found = [], 0, None
    for token in tokens:
        found = builder.push(token, may_stop=True)
        if found is not None:
            break
        streamed.append(builder.since(sent))
        sent += len(streamed[-1])
    builder.finish()
    streamed.append(builder.since(sent))
    return builder.since(0), found, streamed


def expected(text, stops, include):
    """Cut at the stop string that is complete first; of several that end there, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


ALPHABET = (
    "abAB .\n" + "\u00e9\u00df\u4f60\u597d\u3042\ud55c" + "\U0001f600\U0001f468\u200d\u2640\ufe0f" + "e\u0301n\u0303"
)
texts = st.text(st.sampled_from(ALPHABET), max_size=40) | st.text(max_size=20)
places = st.lists(st.integers(0, 200), max_size=60)
stop_sets = st.lists(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=5), max_size=4, unique=True)


@QUICK
@given(text=texts, places=places)
def test_pieces_joined_are_the_text(text, places):
    assume("\ufffd" not in text)
    pieces = cut(text.encode(), places)
    whole, found, streamed = feed(Pieces(pieces), range(len(pieces)))
    assert whole == text == "".join(streamed) and found is None
    assert not any("\ufffd" in piece for piece in streamed)


@QUICK
@given(data=st.binary(max_size=40), places=places)
def test_bytes_that_are_no_text_come_out_as_a_decoder_shows_them(data, places):
    pieces = cut(data, places)
    whole, _, streamed = feed(Pieces(pieces), range(len(pieces)))
    assert "".join(streamed) == whole
    if all(0x20 <= byte < 0x7F or byte == 0xFF for byte in data):  # nothing that joins with its neighbours
        assert whole == data.decode("utf-8", errors="replace")


@st.composite
def stopped_texts(draw):
    """Texts, cuts and stop strings, most of them taken from the text, overlapping and nested."""
    text = draw(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=40))
    stops = draw(stop_sets)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 6))])
    return text, list(dict.fromkeys(stops)), draw(places), draw(places)


def check_stops(text, stops, pieces, include):
    whole, found, streamed = feed(Pieces(pieces), range(len(pieces)), stop=stops, include_stop_str_in_output=include)
    assert (whole, found) == expected(text, stops, include)
    assert "".join(streamed) == whole
    if not include:
        assert not any(stop in whole for stop in stops)
    else:
        assert not any(stop in whole[:-1] for stop in stops)
    hold = max(map(len, stops), default=1)
    ready = b""
    for number, piece in enumerate(pieces[: len(streamed) - 1]):
        ready += piece
        held = len(ready.decode("utf-8", errors="ignore")) - sum(map(len, streamed[: number + 1]))
        yield held, hold


@QUICK
@given(case=stopped_texts(), include=st.booleans())
def test_stop_strings_do_not_depend_on_the_cut_at_characters(case, include):
    text, stops, *cuts = case
    for places in (*cuts, [], range(200)):
        edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
        pieces = [text[start:stop].encode() for start, stop in pairwise(edges)]
        for held, hold in check_stops(text, stops, pieces, include):
            assert 0 <= held < hold, "held back more than a stop string needs"


@QUICK
@given(case=stopped_texts(), include=st.booleans())
def test_stop_strings_do_not_depend_on_the_cut_at_bytes(case, include):
    """The text may also end inside a character: the last bytes are then missing."""
    text, stops, *cuts = case
    assume(not any("\ufffd" in stop for stop in stops))
    for missing in range(4):
        data = text.encode()[: len(text.encode()) - missing]
        shown = data.decode("utf-8", errors="replace")
        for places in (*cuts, [], range(200)):
            for held, hold in check_stops(shown, stops, cut(data, places), include):
                assert 0 <= held < hold, "held back more than a stop string needs"


@pytest.mark.parametrize(
    ("text", "stops", "whole", "found"),
    [
        ("one two", ["two"], "one ", "two"),
        ("one two", ["two", "o tw"], "one two"[:2] + "e ", "two"),
        ("abcd", ["bcd", "c"], "ab", "c"),  # complete first, though the other began first
        ("abcd", ["bc", "abc", "c"], "", "abc"),  # complete together: the longest
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("abc", ["abcd"], "abc", None),  # the beginning of one is no stop
        ("abc", ["abc"], "", "abc"),
        ("a", ["aaaaaaaaaaaaaaaaaaaa"], "a", None),
    ],
)
def test_which_stop_string_wins(text, stops, whole, found):
    for places in ([], range(10), [1, 3], [2]):
        pieces = cut(text.encode(), places)
        assert feed(Pieces(pieces), range(len(pieces)), stop=stops)[:2] == (whole, found)


def test_held_back_text_is_given_out_at_the_end():
    pieces = [b"par", b"t EN"]
    whole, found, streamed = feed(Pieces(pieces), [0, 1], stop="END")
    assert (whole, found, streamed) == ("part EN", None, ["p", "art ", "EN"])


def test_before_min_tokens_a_stop_string_is_text_and_one_that_spans_counts():
    builder = Detokenizer(Pieces([b"END", b" E", b"ND", b"!"]), SamplingParams(stop="END"))
    assert builder.push(0, may_stop=False) is None
    assert builder.push(1, may_stop=False) is None
    assert builder.push(2, may_stop=True) == "END"
    builder.finish()
    assert builder.since(0) == "END "


def test_an_incomplete_character_waits_for_its_bytes_and_is_shown_at_the_end():
    smile = "\U0001f600".encode()
    builder = Detokenizer(Pieces([smile[:1], smile[1:3], smile[3:]]), SamplingParams())
    for token, text in ((0, ""), (1, ""), (2, "\U0001f600")):
        builder.push(token, may_stop=True)
        assert builder.since(0) == text
    cut_off = Detokenizer(Pieces([b"a", smile[:2]]), SamplingParams())
    for token in range(2):
        cut_off.push(token, may_stop=True)
    assert cut_off.since(0) == "a"
    cut_off.finish()
    cut_off.finish()
    assert cut_off.since(0) == "a\ufffd"


def test_bytes_that_never_become_a_character_do_not_wait_for_ever():
    builder = Detokenizer(Pieces([b"\xff"]), SamplingParams())
    for _ in range(3 * MAX_PENDING):
        builder.push(0, may_stop=True)
    assert len(builder.since(0)) >= 2 * MAX_PENDING


@QUICK
@given(signs=st.lists(st.sampled_from("\u00e9\u4f60\U0001f600"), min_size=200, max_size=400), data=st.data())
def test_every_token_may_end_within_a_character(signs, data):
    """So no piece of the text is ever whole; each character comes when it is, and never as something else."""
    text, pieces, start = "".join(signs), [], 0
    code, end = text.encode(), 0
    for sign in signs:
        stop = end + data.draw(st.integers(1, len(sign.encode()) - 1))
        pieces.append(code[start:stop])
        start, end = stop, end + len(sign.encode())
    pieces.append(code[start:])
    whole, _, streamed = feed(Pieces(pieces), range(len(pieces)))
    assert whole == text == "".join(streamed)
    assert all(len(piece) == 1 for piece in streamed[1:-1])


# --- a real tokenizer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level():
    """GPT-2's byte alphabet, some merges, one of them over half a character, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "a"), ("\u0120", "a"), ("\u00e4", "\u00bd"), ("a", "\u00e4"), ("\u00f0", "\u0141")]
    vocab = {token: number for number, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return OurTokenizer(TokenizerParts(backend=backend))


@QUICK
@given(text=texts, stops=stop_sets)
def test_a_byte_level_tokenizer_round_trips(byte_level, text, stops):
    assume("\ufffd" not in text and "<|end|>" not in text)
    tokens = byte_level.encode(text)
    assert byte_level.decode(tokens) == text
    for drawn in (tokens, [byte_level.encode(chr(0))[0], *tokens][1:]):
        whole, found, streamed = feed(byte_level, drawn, stop=stops)
        assert (whole, found) == expected(text, stops, False)
        assert "".join(streamed) == whole


@QUICK
@given(tokens=st.lists(st.integers(0, 261), max_size=40))
def test_any_tokens_of_a_byte_level_tokenizer(byte_level, tokens):
    """Models write invalid bytes now and then: what is given out is never taken back."""
    whole, _, streamed = feed(byte_level, tokens)
    assert "".join(streamed) == whole
    assert whole.replace("\ufffd", "") == byte_level.decode(tokens).replace("\ufffd", "")


def test_special_tokens_are_skipped_unless_asked_for(byte_level):
    end = byte_level.backend.token_to_id("<|end|>")
    tokens = [*byte_level.encode("ab"), end, *byte_level.encode("ba")]
    assert feed(byte_level, tokens)[0] == "abba"
    assert feed(byte_level, tokens, skip_special_tokens=False)[0] == "ab<|end|>ba"
    assert feed(byte_level, tokens, stop="bb")[:2] == ("a", "bb")


def test_a_decoder_that_strips_at_the_start_keeps_the_spaces_between_words():
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581wide": 2, "\u2581world": 3, "!": 4}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = OurTokenizer(TokenizerParts(backend=backend))
    whole, _, streamed = feed(tokenizer, [1, 2, 3, 4, 1])
    assert whole == "Hello wide world! Hello" == tokenizer.decode([1, 2, 3, 4, 1])
    assert streamed == ["Hello", " wide", " world", "!", " Hello", ""]


# --- cost -------------------------------------------------------------------------------------------------------

CASES = {
    "letters": [b"a", b" b"],
    "half characters": [b"\xe4\xbd", b"\xa0"],
    "bytes that are no text": [b"\xff", b"\xfe"],
    "ends within characters": [b"\xa0\xe4\xbd"],
}


@pytest.mark.parametrize("pieces", CASES.values(), ids=CASES)
@pytest.mark.parametrize("stop", [[], ["never in it", "x" * 50]], ids=["no stop", "stops"])
def test_the_work_for_each_token_is_constant(pieces, stop):
    """E4, counted: tokens decoded for 20,000 pushed, against 10,000; and what a stream reads is no more than new."""
    work = {}
    for number in (10_000, 20_000):
        tokenizer = Pieces(pieces)
        builder = Detokenizer(tokenizer, SamplingParams(stop=stop, max_tokens=None))
        for place in range(number):
            builder.push(place % len(pieces), may_stop=True)
        builder.finish()
        work[number] = tokenizer.decoded
    assert work[20_000] < 2.1 * work[10_000]
    assert work[20_000] <= 20_000 * 2 * (MAX_PENDING + 1)  # what waits, and as much context


def test_the_work_for_each_token_without_text_is_constant():
    """Skipped special tokens, and ids of a padded vocabulary, which have no text."""
    work = {}
    for number in (1_000, 2_000):
        tokenizer = Pieces([b"", b"a"])
        builder = Detokenizer(tokenizer, SamplingParams(max_tokens=None))
        for _ in range(number):
            builder.push(0, may_stop=True)
        builder.push(1, may_stop=True)
        assert builder.since(0) == "a"
        work[number] = tokenizer.decoded
    assert work[2_000] < 2.5 * work[1_000]


def test_reading_a_stream_costs_what_is_new(byte_level):
    """E4 for ``since``: it may look at the newest parts only, however many there are."""

    class Parts(list):
        looked_at = 0

        def __reversed__(self):
            for part in super().__reversed__():
                Parts.looked_at += 1
                yield part

    builder = Detokenizer(Pieces([b"ab"]), SamplingParams(max_tokens=None))
    builder._parts = Parts()
    sent = 0
    for _ in range(2_000):
        builder.push(0, may_stop=True)
        sent += len(builder.since(sent))
    assert sent == 4_000 and Parts.looked_at <= 3 * 2_000

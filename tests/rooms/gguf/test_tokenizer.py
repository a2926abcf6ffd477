"""Tokenizers from GGUF metadata: ids equal those of the original tokenizers."""

import pytest

from nanovllm.errors import CheckpointError
from nanovllm.gguf import GGUFCheckpoint
from nanovllm.gguf.tokenizer import CUTS, build_tokenizer
from nanovllm.tokenizer import TokenizerParts


def build(metadata: dict) -> TokenizerParts:
    """Build from metadata in the types in which the reader gives it: lists of strings, tuples of numbers."""
    typed = {
        key: tuple(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in metadata.items()
    }
    return build_tokenizer(typed, "model.gguf")


def pieces(parts: TokenizerParts, text: str) -> list[str]:
    return parts.backend.encode(text, add_special_tokens=False).tokens


def ids(parts: TokenizerParts, text: str) -> str:
    return " ".join(map(str, parts.backend.encode(text).ids))


@pytest.mark.parametrize(
    ("pre", "digits", "words"),
    [
        ("gpt-2", ["123", "123", "1"], ["hel", "l", "o"]),
        ("smollm", list("1231231"), ["hel", "l", "o"]),
        ("qwen2", list("1231231"), ["hel", "l", "o"]),
        ("llama-bpe", ["123", "123", "1"], ["hel", "l", "o"]),
    ],
)
def test_digits_are_cut_as_the_vocabulary_wants(make, pre, digits, words):
    parts = build(make.byte_level(pre, add_bos_token=False))
    assert pieces(parts, "1231231") == digits
    assert pieces(parts, "hello") == words


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("gpt-2", "it's  x1\n\ny!", ["it", "'s", "Ġ", "Ġx", "1", "Ċ", "Ċ", "y", "!"]),
        ("smollm", "a12 ½", ["a", "1", "2", "Ġ", "Â½"]),
        ("qwen2", "IT'S (a)!\n\n 12", ["IT", "'S", "Ġ(", "a", ")!ĊĊ", "Ġ", "1", "2"]),
        ("llama-bpe", "1234 x\r\n  y", ["123", "4", "Ġx", "čĊ", "Ġ", "Ġy"]),
        ("tekken", "camelCase/\n 12", ["camel", "Case", "/Ċ", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_by_the_named_rule(make, pre, text, cut):
    backend = build(make.byte_level(pre, add_bos_token=False)).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == cut


def test_regular_expressions_are_those_of_the_original_tokenizers():
    """transformers holds a copy of them for the same purpose."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name in CUTS.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys():
        assert CUTS[name].regex == mapping.GGUF_PRE_TOKENIZER_SPLITS[name], name


def test_qwen_composes_accents(make):
    parts = build(make.byte_level("qwen2"))
    assert pieces(parts, "e\u0301") == pieces(parts, "\u00e9")


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_every_text_comes_back(make, pre):
    backend = build(make.byte_level(pre, add_bos_token=False)).backend
    for text in ["", " ", "  a  b  ", "😀 日本\r\n\t", "it's 12,345.6 ½", "\u00a0\u200b", "\x00", "a" * 500]:
        assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == text


def test_special_and_user_tokens_are_found_in_text(make):
    parts = build(make.byte_level())
    ids = parts.backend.encode("hel<|end|><tool>").ids
    assert [parts.backend.id_to_token(number) for number in ids] == ["hel", "<|end|>", "<tool>"]
    assert parts.backend.decode(ids) == "hel<tool>"  # only control tokens are special
    assert parts.backend.get_vocab_size() == 263


def test_ends_bos_and_template(make):
    parts = build(make.byte_level("qwen2"))
    assert parts.eos_token_ids == (260, 262)
    assert parts.special_tokens == {"eos_token": "<|end|>"}
    assert parts.chat_template is None
    assert parts.backend.encode("x").tokens == ["x"]
    parts = build(make.byte_level("llama-bpe", bos_token_id=262))
    assert parts.backend.encode("x").tokens == ["<|turn|>", "x"]
    assert parts.special_tokens == {"bos_token": "<|turn|>", "eos_token": "<|end|>"}
    parts = build(make.byte_level("llama-bpe", bos_token_id=262, add_bos_token=False))
    assert parts.backend.encode("x").tokens == ["x"]


def test_sentencepiece_merges_follow_scores(make):
    parts = build(make.sentencepiece(add_space_prefix=False))
    assert parts.backend.encode("abc").tokens == ["<s>", "ab", "c"]  # -1 for ab beats -3 for bc
    assert parts.backend.encode(" ab").tokens == ["<s>", "▁ab"]
    assert parts.backend.encode("é[x]a").tokens == ["<s>", "<0xC3>", "<0xA9>", "[x]", "a"]
    assert parts.backend.decode(parts.backend.encode(" é  ab").ids) == " é  ab"
    assert parts.chat_template == "{{ messages }}"
    assert parts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_puts_a_space_in_front_unless_told_otherwise(make):
    parts = build(make.sentencepiece())
    assert parts.backend.encode("ab").tokens == ["<s>", "▁ab"]
    assert parts.backend.encode(" ab").tokens == ["<s>", "▁", "▁ab"]
    assert parts.backend.decode(parts.backend.encode(" ab").ids) == " ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; known: 'gpt2', 'llama'"),
        ({"pre": "martian"}, "pre is 'martian'.*known: .*smollm"),
        ({"tokens": 3}, "tokens is int; it must be a list"),
        ({"tokens": ["a", "a"]}, "2 tokens have 1 different texts"),
        ({"token_type": [1]}, "token_type is 1; it must be 263 numbers"),
        ({"merges": ["12"]}, "a merge .* is '12'"),
        ({"merges": ["zz yy"]}, "contradict each other"),
        ({"eos_token_id": 1000}, "eos_token_id is 1000.*below 263"),
        ({"add_bos_token": True}, "there is no tokenizer.ggml.bos_token_id"),
    ],
)
def test_descriptions_that_cannot_be_followed_are_refused(make, changes, message):
    with pytest.raises(CheckpointError, match=message):
        build(make.byte_level(**changes))


def test_scores_are_needed(make):
    metadata = make.sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="scores is NoneType"):
        build(metadata)


# What transformers 5.24 answers for these two files.
# fmt: off
SMOLLM2 = {
    "The capital of France is": "504 3575 282 4649 314",
    "def fibonacci(n):\n": "1604 3987 46477 24 94 727 198",
    "Hello world": "19556 905",
    "  leading and trailing  ": "216 2899 284 35079 256",
    "a\n\nb\n": "81 198 198 82 198",
    "tabs\tand  two   three    spaces": "100 7366 197 397 216 827 256 1296 333 5600",
    "\xe9mile e\u0301mile \xf1 n\u0303": "2756 19537 297 151 219 19537 5549 126 304 151 221",
    "def f(x):\n    return x**2  # ok\r\n\r\n":
        "1604 275 24 104 727 472 1003 1792 828 34 216 907 10907 18682",
    "it's I'll WE'RE don't": "269 506 339 3060 26587 23 3256 1326 982",
    "<|im_start|>user\nhi<|im_end|>\n": "1 4093 198 6004 2 198",
    "\u200b\xa0nbsp\u3000wide": "321 229 15442 94 32093 12109 218 3641",
    " ": "216",
    "\n": "198",
    "\u2581under \u2581 bars": "11007 219 5941 29566 219 13256",
    "\x00\x07ctl": "190 195 46262",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                                         b":
        "46880 46880 46880 46880 46880 46880 46880 46880 46880 46880 46880 46880 11510 12427 353 278",
    "https://example.com/a?b=c&d=%20": "4687 1742 7434 30 824 31 81 47 82 45 83 22 84 23446 34 32",
    "\ufb01 ligature \xc5 \xc5 \uac01": "27141 13042 906 5549 223 5549 223 35792 125 219",
    "<0x0A> <unk>": "44 32 104 32 49 46 2067 5131 46",
    "\U0001f1e9\U0001f1ea\U00010348 rare": "10813 225 119 10813 225 120 187 234 231 226 3861",
}
GEMMA3 = {
    "The capital of France is": "2 818 5279 529 7001 563",
    "Once upon a time, there was a little girl named":
        "2 14946 3324 496 990 236764 993 691 496 2268 3953 7489",
    "def fibonacci(n):\n": "2 2063 10779 78113 236769 236749 1473 107",
    "Hello world": "2 9259 1902",
    "  leading and trailing  ": "2 138 26016 532 45330 138",
    "a\n\nb\n": "2 236746 108 236763 107",
    "tabs\tand  two   three    spaces": "2 39218 255968 624 138 13498 139 19891 140 35220",
    "\xe9mile e\u0301mile \xf1 n\u0303": "2 5854 755 545 238288 33432 131079 538 240810",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8":
        "2 144626 236900 12811 237354 94951 95830",
    "def f(x):\n    return x**2  # ok\r\n\r\n":
        "2 2063 517 236769 236781 1473 107 140 2060 1123 1018 236778 138 236865 7546 251 107 251 107",
    "it's I'll WE'RE don't": "2 509 236789 236751 564 236789 859 19716 236789 1357 1537 236789 236745",
    "<|im_start|>user\nhi<|im_end|>\n":
        "2 236820 236909 548 236779 3041 111038 2364 107 2202 236820 236909 548 236779 643 111038 107",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<b>x</b><table>":
        "2 2 105 2364 107 2202 106 107 200 236781 209 168",
    "\u200b\xa0nbsp\u3000wide": "2 237141 432 398 11539 465 366 366 5462",
    " ": "2 236743",
    "": "2",
    "\n": "2 107",
    "\x00\x07ctl": "2 238 245 58514",
    "\ufb01 ligature \xc5 \xc5 \uac01": "2 240811 107109 44667 44667 38541",
    "<0x0A> <unk>": "2 236820 236771 236781 236771 236776 236813 236743 3",
    "\U0001f1e9\U0001f1ea\U00010348 rare": "2 246841 245562 478 382 379 374 8401",
}
# fmt: on


@pytest.mark.slow
def test_smollm2(smollm2_path):
    parts = GGUFCheckpoint(smollm2_path).tokenizer_parts()
    assert {text: ids(parts, text) for text in SMOLLM2} == SMOLLM2
    assert parts.eos_token_ids == (2,)
    assert parts.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (parts.chat_template or "")


@pytest.mark.slow
def test_gemma3(gemma3_path):
    parts = GGUFCheckpoint(gemma3_path).tokenizer_parts()
    assert {text: ids(parts, text) for text in GEMMA3} == GEMMA3
    assert parts.eos_token_ids == (1,)
    assert parts.special_tokens["bos_token"] == "<bos>"
    assert parts.chat_template is None

"""The text of one token alone, so that joined they are the text that was meant.

A token may be part of a character, and some decoders strip the space in front of what they take for a beginning.
"""

import re
from itertools import count
from typing import Any

from nanovllm.tokenizer import INCOMPLETE

PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that byte-level vocabularies write as the character of that number; the others follow from 256 on."""

_others = count(256)
BYTES = {chr(byte if byte in PLAIN else next(_others)): byte for byte in range(256)}
"""What such vocabularies write for each byte."""

SPACE = "\u2581"
"""What sentencepiece writes for a space."""


def text_of(tokenizer: Any, token: int) -> str:
    """Return a token's text. Bytes that are no whole character are surrogates, as ``surrogateescape`` makes them."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    piece = tokenizer.backend.id_to_token(token) or ""
    if INCOMPLETE in text:
        named = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        found = [int(named[1], 16)] if named else [BYTES.get(each, -1) for each in piece]
        return text if -1 in found else bytes(found).decode(errors="surrogateescape")
    stripped = _num_leading(piece, SPACE) - _num_leading(text, " ")
    return " " * stripped + text


def _num_leading(text: str, what: str) -> int:
    return len(text) - len(text.lstrip(what))

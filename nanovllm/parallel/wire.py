"""What travels between an engine of replicas and each of them, as bytes.

    header     HEADER words: MAGIC, running number, then how many numbers, integers and bytes of text follow
    numbers    float64
    integers   int32
    text       JSON in UTF-8

All are in the machine's order, for both ends are on one. What there is one of for each token is in the arrays, the rest
in the text. Whoever reads an array says how much of it he takes, and takes all.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from nanovllm.errors import EngineError
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput

MAGIC = 0x6E765032
HEADER = 6
"""Words, of which the last is 0: so the numbers lie where they can be read at once."""

MESSAGE_BYTES = 2**34
"""Longest message that is read."""


class Parts:
    """A message: its text, and the arrays with the place up to which they have been read."""

    def __init__(self, text: Mapping[str, Any], integers: Sequence[int] = (), numbers: Sequence[float] = ()) -> None:
        self.text = text
        self._integers, self._numbers = integers, numbers
        self._integer_at = self._number_at = 0

    def integers(self, number: int) -> Sequence[int]:
        """Take the next integers."""
        start = self._integer_at
        _check(0 <= number <= len(self._integers) - start, "has too few integers")
        self._integer_at += number
        return self._integers[start : start + number]

    def numbers(self, number: int) -> Sequence[float]:
        """Take the next numbers."""
        start = self._number_at
        _check(0 <= number <= len(self._numbers) - start, "has too few numbers")
        self._number_at += number
        return self._numbers[start : start + number]

    def check_all_is_read(self) -> None:
        """Raise EngineError if the arrays hold more than the text spoke of."""
        rest = len(self._integers) - self._integer_at + len(self._numbers) - self._number_at
        _check(not rest, f"has {rest} integers and numbers that belong to nothing")


class Line:
    """One end of a connection. Raises EOFError once the other end is gone, EngineError for what is no message."""

    def __init__(self, channel: Connection) -> None:
        self.channel = channel
        self._sent, self._read = count(), count()

    def send(self, text: Mapping[str, Any], integers: Iterable[int] = (), numbers: Iterable[float] = ()) -> None:
        """Send a message; waits while the other end does not read."""
        try:
            self.channel.send_bytes(pack(next(self._sent), text, integers, numbers))
        except OSError as error:
            raise EOFError("the other end is gone") from error

    def receive(self) -> Parts:
        """Wait for a message."""
        return self.unpack(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Wait for a message that is unpacked later. For a thread of its own."""
        try:
            return self.channel.recv_bytes(MESSAGE_BYTES)
        except OSError as error:
            raise EOFError("the other end is gone") from error

    def unpack(self, message: bytes) -> Parts:
        """Read the messages of ``receive_bytes`` in their order."""
        return unpack(message, next(self._read))


def pack(number: int, text: Mapping[str, Any], integers: Iterable[int] = (), numbers: Iterable[float] = ()) -> bytes:
    """Return a message as bytes."""
    written = json.dumps(text).encode()
    words, floats = np.fromiter(integers, np.int32), np.fromiter(numbers, np.float64)
    header = np.array([MAGIC, number % 2**31, len(floats), len(words), len(written), 0], np.int32)
    return b"".join((header.tobytes(), floats.tobytes(), words.tobytes(), written))


def unpack(message: bytes, number: int) -> Parts:
    """Read what ``pack`` wrote."""
    _check(len(message) >= 4 * HEADER, f"is {len(message)} bytes long")
    magic, found, *counts, zero = np.frombuffer(message, np.int32, HEADER).tolist()
    _check(magic == MAGIC and zero == 0, "has no header")
    _check(found == number % 2**31, f"is number {found}, not {number % 2**31}")
    num_floats, num_words, num_text = counts
    sizes = (4 * HEADER, 8 * num_floats, 4 * num_words, num_text)
    _check(min(counts) >= 0 and sum(sizes) == len(message), f"is {len(message)} bytes long, not {sum(sizes)}")
    floats_at, words_at, text_at, _ = accumulate(sizes)
    numbers = np.frombuffer(message, np.float64, num_floats, floats_at)
    integers = np.frombuffer(message, np.int32, num_words, words_at)
    return Parts(json.loads(message[text_at:]), integers.tolist(), numbers.tolist())


class Table:
    """Log-probabilities that were sent: one row for each token. Implements ``outputs.Scores``."""

    def __init__(self, parts: Parts, rows: int) -> None:
        sizes = parts.integers(rows)
        self._edges = [0, *accumulate(max(0, size) for size in sizes)]
        self._known = [size >= 0 for size in sizes]
        self._ids, self._ranks = parts.integers(self._edges[-1]), parts.integers(self._edges[-1])
        self._values = parts.numbers(self._edges[-1])

    def entry(self, row: int) -> Any:
        """See ``Scores``; None where a prompt's token has none."""
        if not self._known[row]:
            return None
        places = range(self._edges[row], self._edges[row + 1])
        return {self._ids[at]: Logprob(self._values[at], self._ranks[at] or None) for at in places}

    def own(self, row: int) -> float:
        """See ``Scores``."""
        return self._values[self._edges[row]] if self._known[row] else 0.0


class Sheet:
    """Collects the arrays of outputs that are to be sent."""

    def __init__(self) -> None:
        self.integers: list[int] = []
        self.numbers: list[float] = []

    def write(self, output: RequestOutput, prompt_rows: int) -> list[Any]:
        """Add an output, with the last ``prompt_rows`` log-probabilities of its prompt; return what its text says."""
        metrics = output.metrics
        assert metrics is not None, "an engine measures all"
        times = [metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        counts = [metrics.num_generation_tokens, metrics.num_preemptions, output.num_cached_tokens]
        told: Sequence[Any] = output.prompt_logprobs or ()
        self._write_scores(told[len(told) - prompt_rows :])
        samples = [self._write_sample(sample) for sample in output.outputs]
        return [int(output.request_id), output.finished, times, counts, prompt_rows, samples]

    def _write_sample(self, sample: CompletionOutput) -> list[Any]:
        self.integers += sample.token_ids
        rows = -1 if sample.logprobs is None else len(sample.logprobs)
        self._write_scores(sample.logprobs or ())
        ended = [sample.finish_reason, sample.stop_reason]
        return [sample.index, sample.text, len(sample.token_ids), sample.cumulative_logprob, rows, *ended]

    def _write_scores(self, scores: Sequence[Any]) -> None:
        if isinstance(scores, Logprobs):
            scores = scores.since(0, None)  # the texts are the other end's
        entries = list(scores)
        self.integers += [-1 if entry is None else len(entry) for entry in entries]
        known = [entry for entry in entries if entry is not None]
        self.integers += [token for entry in known for token in entry]
        self.integers += [found.rank or 0 for entry in known for found in entry.values()]
        self.numbers += [found.logprob for entry in known for found in entry.values()]


def read_sample(written: Sequence[Any], parts: Parts, decode: Any) -> CompletionOutput:
    """Read what ``Sheet`` wrote of a sample."""
    index, text, num_tokens, cumulative, rows, finish_reason, stop_reason = written
    tokens = list(parts.integers(num_tokens))
    logprobs = None
    if rows >= 0:
        logprobs = Logprobs([Table(parts, rows)] * rows, range(rows), decode)
    return CompletionOutput(index, text, tokens, cumulative, logprobs, finish_reason, stop_reason)


def read_prompt_rows(rows: int, parts: Parts, logprobs: Logprobs | None) -> None:
    """Read what ``Sheet`` wrote of a prompt, and add it to what is known."""
    table = Table(parts, rows)
    if logprobs is not None:
        logprobs.extend(table, range(rows))


def _check(holds: object, what: str) -> None:
    if not holds:
        raise EngineError(f"a replica's message {what}; it does not run the same code, or memory is damaged.")

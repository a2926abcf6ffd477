"""What a step gets from the host and what it gives back, through memory of the host that the device can read and write.

Host and device each count the steps, and so agree on the slot of a step without a word: a recorded step, which cannot
be told anything, finds its message.

    host      writes slot 0   writes slot 1   reads slot 0   writes slot 2   reads slot 1
    device        receive, work, deliver      receive, work, deliver      receive, ...
    turn                   0         1                1         2
"""

from jaxtyping import Int32, Int64
from torch import Tensor


def receive(inbox: Int32[Tensor, "slots most"], turn: Int64[Tensor, ""], message: Int32[Tensor, " words"]) -> None:
    """Copy the message of this turn. Its first word counts its words; what lies behind them is left as it may be."""
    slot = inbox[int(turn) % len(inbox)]
    number = int(slot[0])
    message[:number] = slot[:number]


def deliver(
    tokens: Int64[Tensor, " rows"] | None, kept: Int64[Tensor, " rows_or_more"], outbox: Int64[Tensor, "slots most"],
    turn: Int64[Tensor, ""],
) -> None:  # fmt: skip
    """Put a step's tokens where the next step and the host find them, if there are any; begin the next turn.

    Nothing else of the step may still read ``turn``. The host may read them when the step has ended.
    """
    if tokens is not None:
        kept[: len(tokens)] = outbox[int(turn) % len(outbox)][: len(tokens)] = tokens
    turn += 1

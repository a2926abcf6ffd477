"""Messages reach the step of their turn whole, tokens reach the host, and the turns go round."""

from importlib import import_module

import pytest
import torch

from nanovllm.ops.exchange import reference
from nanovllm.ops.kernels import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 3


class Kernel:
    """The kernels, imported when they are called."""

    @staticmethod
    def receive(*arguments):
        import_module("nanovllm.ops.exchange.kernel").receive(*arguments)

    @staticmethod
    def deliver(*arguments):
        import_module("nanovllm.ops.exchange.kernel").deliver(*arguments)


each = pytest.mark.parametrize(
    "ops", [reference, pytest.param(Kernel, marks=pytest.mark.skipif(not TRITON, reason="needs triton"))]
)


def on_host(*shape, dtype):
    return torch.full(shape, -9, dtype=dtype, pin_memory=DEVICE == "cuda")


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@each
@pytest.mark.parametrize("words", [1, 5, 1023, 1024, 1025, 4000])
def test_a_message_arrives_whole(ops, words):
    inbox, turn = on_host(SLOTS, 5000, dtype=torch.int32), torch.zeros((), dtype=torch.int64, device=DEVICE)
    message = torch.zeros(4100, dtype=torch.int32, device=DEVICE)
    for number in (0, 1, 2, 3, 7):
        turn.fill_(number)
        slot = inbox[number % SLOTS]
        slot[:words] = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32)
        slot[0] = words
        ops.receive(inbox, turn, message)
        wait()
        assert message[:words].tolist() == slot[:words].tolist()
        beyond = message[-(-words // 1024) * 1024 :]
        assert not beyond.any(), "what is not of the message may take a long time to get"
        assert int(turn) == number


@each
@pytest.mark.parametrize("rows", [1, 7, 32, 200])
def test_tokens_are_delivered_and_the_turn_ends(ops, rows):
    outbox, turn = on_host(SLOTS, 256, dtype=torch.int64), torch.zeros((), dtype=torch.int64, device=DEVICE)
    kept = torch.full((300,), -5, device=DEVICE)
    sent = []
    for number in range(5):
        tokens = torch.randint(-1, 1 << 40, (rows,), device=DEVICE)
        ops.deliver(tokens, kept, outbox, turn)
        wait()
        sent.append(tokens.tolist())
        assert int(turn) == number + 1
        assert kept.tolist() == sent[-1] + [-5] * (300 - rows)
        for ago, tokens in enumerate(sent[::-1][:SLOTS]):
            assert outbox[(number - ago) % SLOTS].tolist() == tokens + [-9] * (256 - rows)


@each
def test_a_step_without_tokens_has_its_turn_too(ops):
    outbox, turn = on_host(SLOTS, 4, dtype=torch.int64), torch.zeros((), dtype=torch.int64, device=DEVICE)
    kept = torch.full((4,), -5, device=DEVICE)
    ops.deliver(None, kept, outbox, turn)
    wait()
    assert (int(turn), kept.unique().tolist(), outbox.unique().tolist()) == (1, [-5], [-9])


@pytest.mark.gpu
def test_a_recorded_step_finds_the_message_of_each_turn():
    """More turns than slots, several under way: what goes in comes out, one step late."""
    from nanovllm.ops.exchange import deliver, receive

    inbox, outbox = on_host(SLOTS, 64, dtype=torch.int32), on_host(SLOTS, 8, dtype=torch.int64)
    turn = torch.zeros((), dtype=torch.int64, device=DEVICE)
    kept, message = torch.zeros(8, dtype=torch.int64, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)

    def step():
        receive(inbox, turn, message)
        deliver(message[1:9].long() + kept, kept, outbox, turn)

    step()
    torch.cuda.synchronize()
    turn.zero_(), kept.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    events, total, found = [], 0, []
    expected = []
    for number in range(200):
        if number >= 2:
            events[number - 2].synchronize()
            found.append(outbox[(number - 2) % SLOTS].tolist())
        slot = inbox[number % SLOTS]
        slot[:9] = number
        slot[0] = 9
        graph.replay()
        events.append(torch.cuda.Event())
        events[-1].record()
        total += number
        expected.append([total] * 8)
    assert found == expected[:-2]

"""Where requests go: by what is queued, and by what is known of their beginning, within a stated bound."""

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.parallel.balance import AFFINITY, MOST_BEGINNINGS, MOST_BLOCKS, Balancer

BLOCK = 4


def prompt(*blocks):
    """Return a prompt of whole blocks, each of one token repeated."""
    return [token for token in blocks for _ in range(BLOCK)]


def test_without_beginnings_the_shortest_queue_is_taken():
    balancer = Balancer(3)
    assert [balancer.place([number] * 9, "", cost) for number, cost in enumerate((10, 6, 4, 3, 3, 5))] == [
        0, 1, 2, 2, 1, 2
    ]  # fmt: skip
    assert balancer.queued == [10, 9, 12]
    balancer.take_off(2, 8)
    assert balancer.place([0] * 9, "", 1) == 2


def test_who_has_as_many_as_may_run_gets_no_more_while_another_has_a_place():
    balancer = Balancer(2, BLOCK, places=3)
    assert [balancer.place(prompt(1, 2), "", cost) for cost in (1, 1, 1)] == [0, 0, 0]
    assert balancer.place(prompt(1, 2), "", 50) == 1, "the beginning is known elsewhere, and there is no place"
    balancer.take_off(0, 3, samples=1)
    assert balancer.place(prompt(3, 4), "", 1, samples=2) == 1, "two samples need two places"
    assert balancer.place(prompt(3, 4), "", 1) == 0
    assert balancer.place(prompt(5, 6), "", 1) == 0, "nobody has a place: the shorter queue"
    assert balancer.samples == [4, 3]


def test_a_beginning_is_worth_a_wait_but_no_longer_one():
    balancer = Balancer(2, BLOCK)
    worth = AFFINITY * 2 * BLOCK
    home = balancer.place(prompt(1, 2), "", worth)
    assert home == 0
    assert balancer.place([*prompt(1, 2), 3], "", 1) == 0, "exactly as much more is queued as it is worth"
    assert balancer.place([*prompt(1, 2), 3], "", 1) == 1, "one token more"
    assert balancer.place([*prompt(1, 2), 3], "", 1) == 1, "both know it now: the shorter queue"


def test_only_whole_blocks_from_the_first_on_count():
    balancer = Balancer(2, BLOCK)
    assert balancer.place(prompt(1, 2, 3), "", 1) == 0
    assert balancer.place(prompt(1, 2)[:3], "", 1) == 1, "less than a block"
    assert balancer.place(prompt(9, 2, 3), "", 2) == 0
    assert balancer.place(prompt(8, 2, 3), "", 1) == 1, "another first block"
    assert balancer.place(prompt(1, 7), "", 1) == 0, "the first block is enough"


def test_a_salt_makes_another_beginning():
    balancer = Balancer(2, BLOCK)
    assert balancer.place(prompt(1, 2), "a", 1) == 0
    assert balancer.place(prompt(1, 2), "b", 1) == 1
    assert balancer.place(prompt(1, 2), "a", 1) == 0
    assert balancer.place(prompt(1, 2), "b", 1) == 1


def test_the_longest_beginning_wins():
    balancer = Balancer(2, BLOCK)
    assert balancer.place(prompt(1), "", 1) == 0
    assert balancer.place(prompt(5, 6, 7), "", 1) == 1
    balancer.take_off(0, 1)
    assert balancer.place(prompt(5, 6, 8), "", 1) == 1
    balancer.forget()
    assert balancer.place(prompt(5, 6, 8), "", 1) == 0, "nothing is known any more"


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    balancer = Balancer(2, 1)
    balancer.place([1, 2, 3], "", 0)
    for start in range(0, MOST_BEGINNINGS + MOST_BLOCKS, MOST_BLOCKS):
        balancer.place(range(start + 10, start + 10 + 2 * MOST_BLOCKS), "", 0)
    assert len(balancer._known) == MOST_BEGINNINGS
    balancer.queued = [1, 0]
    assert balancer.place([1, 2, 3], "", 0) == 1, "its home has been forgotten"


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.sampled_from(["", "s"]), st.integers(1, 60)),
    max_size=40,
)


@given(requests, st.integers(1, 5), st.sampled_from([0, 1, BLOCK]))
def test_no_replica_is_chosen_for_more_than_its_beginning_is_worth(asked, size, block):
    """Against a list of all that was sent; queues end where they began."""
    balancer = Balancer(size, block)
    sent = [[] for _ in range(size)]
    for tokens, salt, cost in asked:
        before = list(balancer.queued)
        chosen = balancer.place(tokens, salt, cost)
        known = [max((shared(tokens, salt, *other, block) for other in others), default=0) for others in sent]
        score = [queued - AFFINITY * found for queued, found in zip(before, known, strict=True)]
        assert chosen == score.index(min(score))
        assert before[chosen] - min(before) <= AFFINITY * known[chosen]
        assert balancer.queued[chosen] == before[chosen] + cost and sum(balancer.queued) == sum(before) + cost
        sent[chosen].append((tokens, salt, cost))
    for replica, others in enumerate(sent):
        for _, _, cost in others:
            balancer.take_off(replica, cost)
    assert balancer.queued == [0] * size


def shared(tokens, salt, others, other_salt, _cost, block):
    """Return how many tokens of whole blocks two prompts share."""
    if salt != other_salt or not block:
        return 0
    same = 0
    for one, other in zip(tokens, others, strict=False):
        if one != other:
            break
        same += 1
    return same // block * block


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 6))
def test_queues_are_never_further_apart_than_one_request(costs, size):
    balancer = Balancer(size)
    for cost in costs:
        balancer.place([1], "", cost)
        assert max(balancer.queued) - min(balancer.queued) <= max(costs)

"""The block manager: exact block numbers on tiny pools, then any sequence of calls against a reference model.

The invariants alone (no block in two places, counts that balance) do not notice a wrong order of eviction, so
the model below predicts every block number. It knows no digests: its keys are whole prefixes.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.block_manager import BlockManager, keyed_hash
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams

SIZE = 4


def request(tokens, *, salt="", arrival=0):
    return Request(
        request_id=f"{arrival}",
        prompt_token_ids=list(tokens),
        params=SamplingParams(),
        max_tokens=64,
        arrival=arrival,
        cache_salt=salt,
    )


def pool(num_blocks, **options):
    return BlockManager(num_blocks, SIZE, **options)


def compute(manager, request, stop=None):
    """What a step does to a request: its tokens up to ``stop`` are in the cache now."""
    request.num_computed_tokens = request.num_tokens if stop is None else stop
    manager.commit(request, request.num_computed_tokens)


def serve(manager, tokens, **options):
    """Admit, compute and free one request."""
    served = request(tokens, **options)
    assert manager.admit(served)
    compute(manager, served)
    manager.free(served)
    return served


def state(manager):
    """Everything a manager knows, for "nothing changed"."""
    return repr((manager._blocks, manager._blank, list(manager._cached), sorted(manager._index), manager.num_evictions))


def books(request):
    """Everything a manager may write in a request. Digests are left out: they are a memory, not a state."""
    return (
        list(request.token_ids),
        list(request.block_ids),
        request.num_computed_tokens,
        request.num_committed_blocks,
        request.chain_parent,
    )


# --- exact examples ---------------------------------------------------------------------------------------------


def test_a_fresh_pool_hands_out_neighbours_from_the_lowest_number():
    manager = pool(6)
    first, second = request(range(9)), request(range(20, 25))
    assert manager.admit(first) and manager.admit(second)
    assert first.block_ids == [0, 1, 2]
    assert second.block_ids == [3, 4]
    assert (manager.num_held, manager.num_free, len(manager._cached)) == (5, 1, 0)


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3), (12, 3), (16, 4)]
)
def test_a_prompt_takes_just_enough_blocks_and_a_hit_never_covers_all_of_it(length, blocks):
    manager = pool(4)
    tokens = list(range(length))
    first = serve(manager, tokens)
    assert manager.num_free == 4 and len(manager._cached) == length // SIZE
    again = request(tokens)
    assert manager.admit(again)
    assert len(again.block_ids) == blocks == manager.blocks_for(length)
    assert again.num_computed_tokens == (length - 1) // SIZE * SIZE < length
    assert first.block_ids == [] and first.num_computed_tokens == 0
    manager.check()


def test_blank_blocks_go_first_then_the_least_recently_used_tails_before_heads():
    manager = pool(8)
    serve(manager, [1] * 9)  # blocks 0 and 1 are full and stay findable, 2 is not full
    assert len(manager._cached) == 2
    serve(manager, [2] * 8)  # takes the blank 2, then 3
    everything = request(range(10, 42))
    assert manager.admit(everything)
    blank, first, second = [4, 5, 6, 7], [1, 0], [3, 2]  # of the evicted, each tail before its head
    assert everything.block_ids == blank + first + second
    assert manager.num_evictions == 4
    manager.check()


def test_a_hit_makes_a_block_recently_used():
    manager = pool(3)
    serve(manager, [1] * 4)
    serve(manager, [2] * 4)
    user = request([1] * 5)
    assert manager.admit(user) and user.block_ids == [0, 2]
    manager.free(user)  # block 2 was never computed, so it is blank; block 0 is younger than block 1 now
    other = request([3] * 9)
    assert manager.admit(other)
    assert other.block_ids == [2, 1, 0]


def test_a_block_is_found_only_after_the_step_that_wrote_it():
    manager = pool(6)
    first, second, third = (request([1] * 9) for _ in range(3))
    assert manager.admit(first) and manager.admit(second)
    assert second.num_computed_tokens == 0 and not set(first.block_ids) & set(second.block_ids)
    manager.free(second)
    compute(manager, first, 7)  # the second block lacks one token
    assert manager.admit(third)
    assert third.num_computed_tokens == 4 and third.block_ids[0] == first.block_ids[0]
    assert third.block_ids[1] != first.block_ids[1]


def test_equal_prompts_in_one_step_leave_one_findable_copy():
    manager = pool(6)
    twins = request([1] * 9), request([1] * 9)
    assert all(manager.admit(twin) for twin in twins)
    assert [twin.block_ids for twin in twins] == [[0, 1, 2], [3, 4, 5]]
    for twin in twins:
        compute(manager, twin)
    manager.free(twins[0])
    manager.free(twins[1])
    assert len(manager._cached) == 2
    third = request([1] * 9)
    assert manager.admit(third) and third.block_ids[:2] == [0, 1]
    manager.check()


def test_the_blocks_after_a_duplicate_continue_the_known_chain():
    manager = pool(7)
    twins = request([1] * 5), request([1] * 5)
    for twin in twins:
        assert manager.admit(twin)
    for twin in twins:
        compute(manager, twin)
    twins[1].token_ids += [2, 2, 2, 2]
    assert manager.grow(twins[1], 9)
    compute(manager, twins[1])
    known = twins[1].block_ids[1]
    manager.free(twins[1])
    again = request([1, 1, 1, 1, 1, 2, 2, 2, 2])
    assert manager.admit(again)
    assert again.block_ids[:2] == [twins[0].block_ids[0], known]


def test_a_block_whose_parent_is_gone_does_not_hide_the_next_one_of_its_kind():
    """The second of two twins continues the first one's block, not its own, and that one may be evicted before it."""
    for ended in (False, True):
        manager, prompt = pool(5), [1] * 4 + [2] * 4 + [3]
        short, long = request(prompt[:5]), request(prompt)
        assert manager.admit(short) and manager.admit(long)
        for twin in (short, long):
            compute(manager, twin)
        manager.free(short)
        other = request([4] * 8)
        assert manager.admit(other) and manager.num_evictions == 1
        manager.free(other)
        if ended:
            manager.free(long)
        serve(manager, prompt[:8])
        assert len(manager.pin(request(prompt))) == 2
        manager.check()


def test_the_same_tokens_after_another_beginning_are_another_block():
    manager = pool(6)
    serve(manager, [1] * 4 + [2] * 4)
    other = request([3] * 4 + [2] * 4 + [0])
    assert manager.admit(other) and other.num_computed_tokens == 0


def test_what_was_evicted_is_not_found():
    manager = pool(2)
    serve(manager, [1] * 8)
    serve(manager, [2] * 8)
    again = request([1] * 8)
    assert manager.admit(again) and again.num_computed_tokens == 0
    assert manager.num_evictions == 4


def test_salts_keep_prefixes_apart():
    manager = pool(8)
    serve(manager, [1] * 8, salt="mine")
    for salt, hit in (("", 0), ("yours", 0), ("mine", 4)):
        reader = request([1] * 8, salt=salt)
        assert manager.admit(reader) and reader.num_computed_tokens == hit, salt
        manager.free(reader)


def test_growth_takes_a_block_exactly_when_the_last_one_is_full():
    manager = pool(3)
    grower = request([1] * 7)
    assert manager.admit(grower) and grower.block_ids == [0, 1]
    assert manager.grow(grower, 8) and grower.block_ids == [0, 1]
    assert manager.grow(grower, 9) and grower.block_ids == [0, 1, 2]
    assert manager.grow(grower, 12) and grower.block_ids == [0, 1, 2]
    assert not manager.grow(grower, 13) and grower.block_ids == [0, 1, 2]


def test_a_refusal_changes_nothing():
    manager = pool(4)
    serve(manager, [1] * 9)
    holder = request([2] * 5)
    assert manager.admit(holder)
    for refused, reserve in ((request([1] * 13), 0), (request([1] * 9), 1), (request([3] * 9), 0)):
        before = state(manager), books(refused)
        assert not manager.admit(refused, reserve=reserve)
        assert (state(manager), books(refused)) == before
    before = state(manager), books(holder)
    assert not manager.grow(holder, 17)
    assert (state(manager), books(holder)) == before


def test_a_hit_that_nobody_reads_does_not_count_as_free_as_well():
    manager = pool(3)
    serve(manager, [1] * 8)  # two cached, one blank
    assert manager.num_free == 3
    assert not manager.admit(request([1] * 16))  # two hits and two more: three blocks there are
    assert not manager.admit(request([1] * 9), reserve=1)
    assert manager.admit(request([1] * 9))


def test_a_hit_on_a_block_that_is_held_costs_nothing():
    manager = pool(3)
    holder = request([1] * 8)
    assert manager.admit(holder)
    compute(manager, holder)
    reader = request([1] * 9)
    assert manager.admit(reader) and reader.block_ids == [0, 1, 2]
    manager.free(holder)
    assert manager.num_held == 3
    manager.free(reader)
    assert manager.num_held == 0
    manager.check()


def test_pinned_blocks_stay_until_they_are_unpinned():
    manager = pool(4)
    prompt = serve(manager, [1] * 9)
    pins = manager.pin(prompt)
    assert pins == [0, 1] and manager.num_held == 2
    assert not manager.admit(request([2] * 12))
    serve(manager, [2] * 8)
    reader = request([1] * 8 + [5])
    assert manager.admit(reader) and reader.block_ids[:2] == pins
    manager.free(reader)
    assert not manager.reset_prefix_cache()
    manager.unpin(pins)
    assert manager.num_held == 0
    everything = request([3] * 16)
    assert manager.admit(everything)
    assert everything.block_ids[-2:] == [1, 0]  # released last, so evicted last, and the tail before the head
    manager.check()


def test_pins_add_up_and_cover_whole_blocks_of_the_prompt_only():
    manager = pool(4)
    prompt = serve(manager, [1] * 11)
    first, second = manager.pin(prompt), manager.pin(prompt)
    assert first == second == [0, 1]
    manager.unpin(first)
    assert manager.num_held == 2
    manager.unpin(second)
    assert manager.num_held == 0
    assert manager.pin(request([1] * 3)) == []
    assert manager.pin(request([1] * 8)) == [0, 1]  # a pin may cover all of a prompt, for it computes nothing


def test_reset_forgets_everything_but_only_when_nobody_reads():
    manager = pool(4)
    serve(manager, [1] * 8)
    holder = request([2] * 4)
    assert manager.admit(holder)
    before = state(manager)
    assert not manager.reset_prefix_cache()
    assert state(manager) == before
    manager.free(holder)
    assert manager.reset_prefix_cache()
    assert (len(manager._cached), manager.num_free, manager.num_evictions) == (0, 4, 0)
    again = request([1] * 8)
    assert manager.admit(again) and again.num_computed_tokens == 0
    manager.check()


def test_without_prefix_caching_nothing_is_ever_found():
    manager = pool(4, enable_prefix_caching=False)
    first = serve(manager, [1] * 9)
    assert len(manager._cached) == 0 and manager.pin(first) == []
    again = request([1] * 9)
    assert manager.admit(again) and again.num_computed_tokens == 0


def test_a_resumed_request_finds_its_own_output_too():
    manager = pool(4)
    request_ = request([1] * 3)
    assert manager.admit(request_)
    compute(manager, request_)
    request_.token_ids += [2] * 6
    assert manager.grow(request_, 9)
    compute(manager, request_)
    held = list(request_.block_ids)
    manager.free(request_)
    assert manager.admit(request_)
    assert request_.num_computed_tokens == 8 and request_.block_ids[:2] == held[:2]


def test_the_hash_is_keyed_and_has_sixteen_bytes():
    assert keyed_hash()(b"a") != keyed_hash()(b"a")
    once = keyed_hash()
    assert once(b"a") == once(b"a") != once(b"b") and len(once(b"a")) == 16


@pytest.mark.parametrize("damage", ["count", "twice", "lost", "stale", "unmapped"])
def test_check_notices_damage(damage):
    manager = pool(4)
    serve(manager, [1] * 8)
    manager.check()
    if damage == "count":
        manager._blocks[3].ref_count = 1
    elif damage == "twice":
        manager._blank.append(manager._blank[0])
    elif damage == "lost":
        manager._blank.pop()
    elif damage == "stale":
        manager._blocks[2].digest = manager._blocks[1].digest
    else:
        manager._index.clear()
    with pytest.raises((AssertionError, KeyError)):
        manager.check()


# --- any sequence of calls --------------------------------------------------------------------------------------


@dataclass
class Known:
    """A findable block of the model: the whole prefix up to its end, and the entry it continues."""

    block: int
    prefix: tuple
    parent: object


@dataclass
class Model:
    """What a block manager must do, said with whole prefixes, two lists and a count."""

    num_blocks: int
    constant_hash: bool
    blank: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    """Least recently used first."""
    refs: Counter = field(default_factory=Counter)
    known: dict[object, Known] = field(default_factory=dict)

    def __post_init__(self):
        self.blank = list(range(self.num_blocks))[::-1]

    def key(self, prefix):
        return None if self.constant_hash else prefix

    def match(self, salt, tokens, limit):
        chain, parent = [], None
        for place in range(limit):
            prefix = (salt, *tokens[: (place + 1) * SIZE])
            entry = self.known.get(self.key(prefix))
            if entry is None or entry.prefix != prefix or entry.parent is not parent:
                break
            chain.append(entry)
            parent = entry
        return chain

    def take(self, number):
        taken = []
        for _ in range(number):
            if self.blank:
                taken.append(self.blank.pop())
            else:
                taken.append(self.cached.pop(0))
                self.known = {key: entry for key, entry in self.known.items() if entry.block != taken[-1]}
            self.refs[taken[-1]] = 1
        return taken

    def hold(self, blocks):
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
            self.refs[block] += 1

    def release(self, blocks):
        findable = {entry.block for entry in self.known.values()}
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                (self.cached if block in findable else self.blank).append(block)

    def admit(self, salt, tokens, reserve):
        """Return (block table, chain of hits), or None where there is no room."""
        chain = self.match(salt, tokens, (len(tokens) - 1) // SIZE)
        hits = [entry.block for entry in chain]
        missing = -(-len(tokens) // SIZE) - len(hits)
        left = [block for block in self.blank + self.cached if block not in hits]
        if missing + reserve > len(left):
            return None
        self.hold(hits)
        return hits + self.take(missing), chain

    def commit(self, salt, tokens, table, chain, stop):
        """Extend ``chain`` by the blocks that are full at ``stop`` tokens."""
        for place in range(len(chain), stop // SIZE):
            parent = chain[-1] if chain else None
            prefix = (salt, *tokens[: (place + 1) * SIZE])
            entry = self.known.get(self.key(prefix))
            before = self.known.get(self.key((salt, *tokens[: place * SIZE])))
            if entry is not None and place and (before is None or before is not entry.parent):
                del self.known[self.key(prefix)]
                if entry.block in self.cached:
                    self.cached.remove(entry.block)
                    self.blank.append(entry.block)
                entry = None
            if entry is None or entry.prefix != prefix or entry.parent is not parent:
                new = Known(table[place], prefix, parent)
                if entry is None:
                    self.known[self.key(prefix)] = new
                entry = new
            chain.append(entry)


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests come, are computed in pieces, grow, lose their blocks and come again; pins and resets in between.

    ``slots`` plays the cache: each place holds the salt and the prefix that a key there would depend on.
    """

    manager_class = BlockManager
    constant_hash = False

    prompts = st.builds(
        lambda blocks, cut: [letter for letter in blocks for _ in range(SIZE)][: len(blocks) * SIZE - cut],
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.integers(0, SIZE - 1),
    )
    """Two letters, in blocks of one letter each, so that most prompts begin like another one."""
    picks = st.integers(0, 1000)

    @initialize(num_blocks=st.integers(2, 10))
    def begin(self, num_blocks):
        options = {"hash_function": lambda data: b"same"} if self.constant_hash else {}
        self.manager = self.manager_class(num_blocks, SIZE, **options)
        self.model = Model(num_blocks, self.constant_hash)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.chains: dict[Request, list[Known]] = {}
        self.pins: list[list[int]] = []
        self.slots: dict[int, tuple] = {}
        self.arrivals = 0

    def pick(self, requests, number):
        return requests[number % len(requests)]

    def prefix(self, request, place):
        return (request.cache_salt, *request.token_ids[: place + 1])

    def slot(self, request, place):
        return request.block_ids[place // SIZE] * SIZE + place % SIZE

    def admit(self, request, reserve):
        before = state(self.manager), books(request)
        expected = self.model.admit(request.cache_salt, request.token_ids, reserve)
        admitted = self.manager.admit(request, reserve=reserve)
        assert admitted == (expected is not None)
        if expected is None:
            assert (state(self.manager), books(request)) == before, "a refusal changed something"
            return False
        table, chain = expected
        assert request.block_ids == table
        assert request.num_computed_tokens == len(chain) * SIZE < request.num_tokens
        for place in range(request.num_computed_tokens):
            assert self.slots[self.slot(request, place)] == self.prefix(request, place), "a wrong hit"
        self.running.append(request)
        self.chains[request] = chain
        return True

    @rule(tokens=prompts, salt=st.sampled_from(["", "", "", "s"]), reserve=st.sampled_from([0, 0, 0, 1, 2]))
    def arrive(self, tokens, salt, reserve):
        self.arrivals += 1
        new = request(tokens, salt=salt, arrival=self.arrivals)
        if not self.admit(new, reserve):
            self.waiting = [*self.waiting[-2:], new]

    @rule(tokens=prompts, letter=st.integers(0, 1), more=st.integers(0, 2 * SIZE), end=st.booleans())
    def arrive_and_be_computed(self, tokens, letter, more, end):
        """Several of the other rules at once, to come to interesting states sooner."""
        place = len(self.running)
        self.arrive(tokens, "", 0)
        if len(self.running) > place:
            self.compute_some(place, len(tokens))
            if more:
                self.append_and_grow(place, letter, more)
                self.compute_some(place, more)
            if end:
                self.lose_blocks(place, again=False)

    @precondition(lambda self: self.waiting)
    @rule(number=picks)
    def come_again(self, number):
        request = self.pick(self.waiting, number)
        if self.admit(request, 0):
            self.waiting.remove(request)

    @precondition(lambda self: self.running)
    @rule(number=picks, size=st.integers(1, 24))
    def compute_some(self, number, size):
        """One span of a step: write, then commit."""
        request = self.pick(self.running, number)
        stop = min(request.num_computed_tokens + size, request.num_tokens, len(request.block_ids) * SIZE)
        for place in range(request.num_computed_tokens, stop):
            self.slots[self.slot(request, place)] = self.prefix(request, place)
        for place in range(stop):
            assert self.slots[self.slot(request, place)] == self.prefix(request, place), "a block has two writers"
        compute(self.manager, request, stop)
        chain = self.chains[request]
        self.model.commit(request.cache_salt, request.token_ids, request.block_ids, chain, stop)
        assert request.num_committed_blocks == len(chain)

    @precondition(lambda self: self.running)
    @rule(number=picks, letter=st.integers(0, 1), length=st.integers(1, 3 * SIZE))
    def append_and_grow(self, number, letter, length):
        request, tokens = self.pick(self.running, number), [letter] * length
        request.token_ids += tokens
        wanted = self.manager.blocks_for(request.num_tokens)
        missing = wanted - len(request.block_ids)
        room = missing <= len(self.model.blank) + len(self.model.cached)
        before = state(self.manager), books(request)
        assert self.manager.grow(request, request.num_tokens) == room
        if not room:
            assert (state(self.manager), books(request)) == before, "a refusal changed something"
            del request.token_ids[-len(tokens) :]
            return
        assert request.block_ids == before[1][1] + self.model.take(missing)

    @precondition(lambda self: self.running)
    @rule(number=picks, again=st.booleans())
    def lose_blocks(self, number, again):
        """The request ends, or is preempted and will come again."""
        request = self.pick(self.running, number)
        self.model.release(request.block_ids)
        self.manager.free(request)
        assert request.block_ids == [] and request.num_computed_tokens == 0
        self.running.remove(request)
        del self.chains[request]
        if again:
            self.waiting.append(request)

    @precondition(lambda self: self.running or self.waiting)
    @rule(number=picks)
    def pin(self, number):
        request = self.pick(self.running + self.waiting, number)
        prompt = request.prompt_token_ids
        chain = self.model.match(request.cache_salt, prompt, len(prompt) // SIZE)
        expected = [entry.block for entry in chain]
        pins = self.manager.pin(request)
        assert pins == expected
        self.model.hold(expected)
        self.pins.append(pins)

    @precondition(lambda self: self.pins)
    @rule(number=picks)
    def unpin(self, number):
        pins = self.pick(self.pins, number)
        self.pins.remove(pins)
        self.model.release(pins)
        self.manager.unpin(pins)

    @rule()
    def reset(self):
        model = self.model
        idle = len(model.blank) + len(model.cached) == model.num_blocks
        assert self.manager.reset_prefix_cache() == idle
        if idle:
            model.blank += reversed(model.cached)
            model.cached, model.known = [], {}

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        manager.check()
        holders = Counter(block for table in [r.block_ids for r in self.running] + self.pins for block in table)
        assert {block.index: block.ref_count for block in manager._blocks if block.ref_count} == holders
        assert manager.num_held == len(holders)
        assert manager._blank == model.blank
        assert list(manager._cached) == model.cached
        assert {block.index for block in manager._index.values()} == {e.block for e in model.known.values()}
        for entry in list(model.known.values()):
            salt, *tokens = entry.prefix
            chain = model.match(salt, tokens, len(tokens) // SIZE)
            found = manager._match(request(tokens, salt=salt), len(tokens) // SIZE)
            assert [block.index for block in found] == [known.block for known in chain]
        for running in self.running:
            assert len(set(running.block_ids)) == len(running.block_ids)
            for place, block in enumerate(running.block_ids):
                if holders[block] > 1:
                    end = (place + 1) * SIZE
                    assert end <= running.num_computed_tokens, "a shared block is not full"
                    assert self.slots[self.slot(running, end - 1)] == self.prefix(running, end - 1)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request in self.running:
            self.manager.free(request)
        for pins in self.pins:
            self.manager.unpin(pins)
        self.manager.check()
        assert self.manager.num_free == self.manager.num_blocks, "blocks leaked"
        assert not any(block.ref_count for block in self.manager._blocks)


class ConstantHashMachine(BlockManagerMachine):
    """Every digest is the same: still no wrong hit."""

    constant_hash = True


SETTINGS = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, database=None)

TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = SETTINGS
TestConstantHash = ConstantHashMachine.TestCase
TestConstantHash.settings = SETTINGS

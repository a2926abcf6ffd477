"""Who holds which block of the key-value cache, and which blocks can be found again by their content.

The cache is cut into blocks of ``block_size`` tokens (PagedAttention, Kwon et al. 2023, arXiv 2309.06180). A
request owns a list of block numbers, its block table; requests with a common prefix share the full blocks of it.
This file knows numbers only: the tensors are in ``kv_cache.py``.

    digest of a block = BLAKE2b(key; digest of the block before it, its tokens)
                                     |
    salt --> [ t t t t ] --> [ t t t t ] --> [ t t . . ]      only full blocks have a digest
             block 7         block 2         block 9

A digest finds a block; the block's own tokens and its ``parent`` then decide, so even a hash function that maps
everything to one value gives no wrong hit.
"""

import logging
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from nanovllm.request import Request

logger = logging.getLogger(__name__)

HashFunction = Callable[[bytes], bytes]


@dataclass(slots=True)
class Block:
    """One block, in exactly one of three states.

    held    ref_count > 0    requests (or a pin) read it
    cached  ref_count == 0   full, findable, read by nobody; may be found or evicted
    blank   ref_count == 0   holds nothing worth keeping
    """

    index: int
    ref_count: int = 0
    digest: bytes | None = None
    """Its key in the prefix index; None if it cannot be found."""
    tokens: tuple[int, ...] = ()
    parent: int | str = ""
    """``serial`` of the block before it, or the salt for a first block."""
    serial: int = 0
    """Unique for each content that was ever registered, so a parent that was evicted is never mistaken."""


class BlockManager:
    """Hands out blocks, counts their readers, and keeps the prefix index.

    Blocks are taken from the blank ones first, then by evicting the cached block unused for longest, tails of
    a request before its head. Time: O(1) for each block touched.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self.journal: list[tuple[str, int]] | None = None
        """If a list: all that happens to a block is added, in order, as (event, index). A block is "evict"ed; "take"n,
        with one reader; "hold" by one more; "free" of one; "know"n, so that it can be found; "forget": not any more."""
        self._hash = hash_function or keyed_hash()
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._blank = list(reversed(range(num_blocks)))  # a stack: low numbers first, so new tables are contiguous
        self._cached: dict[int, None] = {}  # in order of release: the first is the least recently used
        self._index: dict[bytes, Block] = {}
        self._serials = count(1)

    @property
    def num_free(self) -> int:
        """Blocks that could be taken now, blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that some request or pin reads."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, *, reserve: int = 0) -> bool:
        """Give a waiting request blocks for all its tokens, or return False and change nothing.

        Leading blocks come from the prefix cache where they can be found, and ``num_computed_tokens`` then
        starts behind them; at least one token is always left to compute, and all whose rows tell log-probabilities of
        the prompt. ``reserve`` blocks stay free.
        """
        hits = self._match(request, self._findable(request))
        missing = self.blocks_for(request.num_tokens) - len(hits)
        if missing + reserve > self.num_free - sum(block.ref_count == 0 for block in hits):
            return False
        self._hold(hits)
        request.block_ids = [block.index for block in hits] + self._take(missing)
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_committed_blocks = len(hits)
        request.chain_parent = hits[-1].serial if hits else request.cache_salt
        logger.debug("request %s takes blocks %s, %d found", request.request_id, request.block_ids, len(hits))
        return True

    def announce(self, request: Request, turn: tuple[int, ...], coming: dict[bytes, tuple[int, ...]]) -> None:
        """Add the full blocks of a prompt that are not committed yet, by digest, with whose turn they come."""
        number = len(request.prompt_token_ids) // self.block_size if self.enable_prefix_caching else 0
        for place in range(request.num_committed_blocks, number):
            coming.setdefault(self._digest(request, place), turn)

    def awaits(self, request: Request, turn: tuple[int, ...], coming: Mapping[bytes, tuple[int, ...]]) -> bool:
        """Whether half or more of what a request has to compute is ``coming``, from those before its ``turn``."""
        most = self._findable(request)
        place = known = len(self._match(request, most))
        while place < most and coming.get(self._digest(request, place), turn) < turn:
            place += 1
        return place > known and (2 * place - known) * self.block_size >= request.num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a running request blocks for ``num_tokens`` tokens, or return False and change nothing."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > self.num_free:
            return False
        if missing > 0:
            request.block_ids += self._take(missing)
            logger.debug("request %s grows by blocks %s", request.request_id, request.block_ids[-missing:])
        return True

    def commit(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that the request's first ``num_tokens`` tokens fill findable, once they are written.

        Where an equal block is known already, that one stays the one to be found, unless the block before it is gone:
        then nobody finds it, and it would keep the new one from being found.
        """
        if not self.enable_prefix_caching:
            return
        for place in range(request.num_committed_blocks, num_tokens // self.block_size):
            digest, tokens = self._digest(request, place), self._tokens(request, place)
            known = self._index.get(digest)
            block = self._blocks[request.block_ids[place]]
            before = self._index.get(request.digests[place - 1])
            if known is not None and place and (before is None or before.serial != known.parent):
                self._forget(known)
                if known.ref_count == 0:
                    del self._cached[known.index]
                    self._blank.append(known.index)
                known = None
            if known is not None and (known.tokens, known.parent) == (tokens, request.chain_parent):
                request.chain_parent = known.serial
            else:
                block.serial = next(self._serials)
                if known is None:
                    block.digest, block.tokens, block.parent = digest, tokens, request.chain_parent
                    self._index[digest] = block
                    self._note("know", block.index)
                request.chain_parent = block.serial
            request.num_committed_blocks = place + 1

    def free(self, request: Request) -> None:
        """Take back every block of a request; findable ones stay cached."""
        self._release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_committed_blocks = 0
        request.chain_parent = request.cache_salt

    def forget(self, request: Request) -> list[int]:
        """Let nobody find the blocks that a request alone holds; return them. What others read too is sound."""
        own = [block for block in map(self._blocks.__getitem__, request.block_ids) if block.ref_count == 1]
        for block in own:
            if block.digest is not None:
                self._forget(block)
        return [block.index for block in own]

    def pin(self, request: Request) -> list[int]:
        """Hold the known leading blocks of a request's prompt, whatever becomes of it, until ``unpin``."""
        self._hold(blocks := self._match(request, len(request.prompt_token_ids) // self.block_size))
        return [block.index for block in blocks]

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Let go of what ``pin`` returned."""
        self._release(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing happens, while any block is held."""
        if self.num_held:
            return False
        for index in reversed(self._cached):
            self._forget(self._blocks[index])
            self._blank.append(index)
        self._cached.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. For tests and idle moments; O(blocks)."""
        assert len(set(self._blank)) == len(self._blank) and not set(self._blank) & set(self._cached)
        for block in self._blocks:
            assert (block.ref_count == 0) == (block.index in self._cached or block.index in self._blank)
            assert block.digest is None or self._index[block.digest] is block
            assert (block.index not in self._blank) or block.digest is None
            assert (block.index not in self._cached) or block.digest is not None
        assert len(self._index) == sum(block.digest is not None for block in self._blocks)

    def _findable(self, request: Request) -> int:
        """How many leading blocks a request may find: a token is left, and all that tell of the prompt."""
        unscored = request.unscored(0, request.num_tokens)
        return (unscored.start if unscored else request.num_tokens - 1) // self.block_size

    def _match(self, request: Request, limit: int) -> list[Block]:
        """Return the longest chain of known blocks that begins the request, ``limit`` at most."""
        found: list[Block] = []
        parent: int | str = request.cache_salt
        for place in range(limit if self.enable_prefix_caching else 0):
            block = self._index.get(self._digest(request, place))
            if block is None or (block.tokens, block.parent) != (self._tokens(request, place), parent):
                break
            found.append(block)
            parent = block.serial
        return found

    def _digest(self, request: Request, place: int) -> bytes:
        """Return the digest of the request's block at ``place``; each is computed once in a request's life."""
        digests = request.digests
        while len(digests) <= place:
            parent = digests[-1] if digests else self._hash(request.cache_salt.encode("utf-8", "surrogatepass"))
            digests.append(self._hash(parent + array("i", self._tokens(request, len(digests))).tobytes()))
        return digests[place]

    def _tokens(self, request: Request, place: int) -> tuple[int, ...]:
        return tuple(request.token_ids[place * self.block_size : (place + 1) * self.block_size])

    def _take(self, number: int) -> list[int]:
        taken = [self._blank.pop() if self._blank else self._evict() for _ in range(number)]
        for index in taken:
            self._blocks[index].ref_count = 1
            self._note("take", index)
        return taken

    def _evict(self) -> int:
        index = next(iter(self._cached))
        del self._cached[index]
        self._note("evict", index)
        self._forget(self._blocks[index])
        self.num_evictions += 1
        logger.debug("block %d is evicted", index)
        return index

    def _forget(self, block: Block) -> None:
        assert block.digest is not None
        del self._index[block.digest]
        self._note("forget", block.index)
        block.digest, block.tokens, block.parent = None, (), ""

    def _hold(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_count == 0:
                del self._cached[block.index]
            block.ref_count += 1
            self._note("hold", block.index)

    def _release(self, block_ids: Sequence[int]) -> None:
        """Drop one reader each, tails first, so that a tail is evicted before the head it is useless without."""
        for index in reversed(block_ids):
            block = self._blocks[index]
            block.ref_count -= 1
            self._note("free", index)
            if block.ref_count == 0:
                if block.digest is None:
                    self._blank.append(index)
                else:
                    self._cached[index] = None

    def _note(self, event: str, index: int) -> None:
        if self.journal is not None:
            self.journal.append((event, index))


def keyed_hash() -> HashFunction:
    """Return BLAKE2b with 16 bytes of digest under a key drawn now, so that nobody can prepare a collision."""
    key = secrets.token_bytes(32)
    return lambda data: blake2b(data, digest_size=16, key=key).digest()

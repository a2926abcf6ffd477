"""Test the tests: faults planted in scheduler and block manager, one at a time, must be found.

A mutant is a change of the source text, so that it is the shipped code that runs, but for one line. If a text is
not there any more (the test says so), write the same fault into the new code. To see which check finds what, and
how fast, also for pairs that are not in the table:

    PYTHONPATH=. python tests/unit/test_mutants.py
"""

import sys
import time
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from nanovllm import block_manager, scheduler
from nanovllm.errors import EngineError


def sibling(name):
    """Load a test file that lies beside this one."""
    spec = spec_from_file_location(f"mutants_{name}", Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BLOCKS, SCHEDULES = sibling("test_block_manager"), sibling("test_scheduler")

FOUND = (AssertionError, LookupError, ValueError, TypeError, AttributeError, StopIteration)
"""What a test or the broken code itself may raise."""

QUICK = settings(
    BLOCKS.SETTINGS,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old`` becomes ``new`` in a module, and the checks in ``found_by`` must notice."""

    name: str
    module: ModuleType
    old: str
    new: str
    found_by: tuple[str, ...]
    times: int = 1

    def parts(self):
        """Return (block manager class, scheduler class), one of them mutated."""
        path = Path(self.module.__file__)
        source = path.read_text(encoding="utf-8")
        assert source.count(self.old) == self.times, f"{path.name} has changed; plant this fault anew"
        mutated = ModuleType(self.module.__name__)
        exec(compile(source.replace(self.old, self.new), path, "exec"), mutated.__dict__)
        if self.module is block_manager:
            return mutated.BlockManager, scheduler.Scheduler
        return block_manager.BlockManager, mutated.Scheduler


SEARCHES = 10
"""A search ends with the first example that finds the fault, and of some faults one in a hundred does."""


def by_machine(base, manager):
    machine = type("Machine", (base,), {"manager_class": manager})
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=SEARCHES * QUICK.max_examples))


def by_model(manager, _):
    by_machine(BLOCKS.BlockManagerMachine, manager)


def by_constant_hash(manager, _):
    by_machine(BLOCKS.ConstantHashMachine, manager)


def by_workloads(manager, scheduler_class):
    for seed in SCHEDULES.SEEDS:
        SCHEDULES.check(seed, manager=manager, scheduler=scheduler_class)


def by_pins(manager, scheduler_class):
    try:
        SCHEDULES.check_full_of_pins(manager=manager, scheduler=scheduler_class)
    except EngineError as error:
        raise AssertionError(str(error)) from error


def by_examples(manager, _):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BLOCKS, "BlockManager", manager)
        for name, test in vars(BLOCKS).items():
            if name.startswith("test_") and not hasattr(test, "pytestmark"):
                test()


def by_order(manager, scheduler_class):
    SCHEDULES.check_nobody_waits_for_a_later_one(manager=manager, scheduler=scheduler_class)


CHECKS = {
    "order": by_order,
    "examples": by_examples,
    "model": by_model,
    "constant hash": by_constant_hash,
    "workloads": by_workloads,
    "pins": by_pins,
}

ALL, MODELS, WORKLOADS = ("model", "constant hash", "workloads"), ("model", "constant hash"), ("workloads",)
MODEL, CONSTANT, EXAMPLES = ("model",), ("constant hash",), ("examples",)

MUTANTS = [
    # the block manager
    Mutant("a reader is not counted down", block_manager, "block.ref_count -= 1", "block.ref_count -= 0", ALL),
    Mutant(
        "a shared block is not counted down", block_manager,
        "block.ref_count -= 1", "block.ref_count -= block.ref_count == 1", ALL,
    ),
    Mutant("an evicted block stays in the index", block_manager, "del self._index[block.digest]", "pass", ALL),
    Mutant(
        "a freed block is evicted first", block_manager,
        "self._cached[index] = None", "self._cached = {index: None, **self._cached}", MODEL,
    ),
    Mutant("the youngest is evicted", block_manager, "next(iter(self._cached))", "next(reversed(self._cached))", MODEL),
    Mutant(
        "a blank block is used last", block_manager,
        "if block.digest is None:\n                    self._blank.append(index)",
        "if block.digest is None:\n                    self._blank.insert(0, index)", MODELS,
    ),
    Mutant("heads are freed before tails", block_manager, "in reversed(block_ids)", "in block_ids", MODELS),
    Mutant(
        "a block that nobody can find hides the next one", block_manager,
        "before is None or before.serial != known.parent", "False", ("examples", "constant hash"),
    ),
    Mutant(
        "a block that nobody can find is taken for blank while it is held", block_manager,
        "if known.ref_count == 0:", "if True:", ("examples", "constant hash"),
    ),
    Mutant("a digest forgets the parent", block_manager, "self._hash(parent + array", "self._hash(b'' + array", MODEL),
    Mutant(
        "a hit compares tokens only", block_manager,
        "(block.tokens, block.parent) != (self._tokens(request, place), parent)",
        "block.tokens != self._tokens(request, place)", CONSTANT,
    ),
    Mutant(
        "a hit trusts the digest", block_manager,
        "block is None or (block.tokens, block.parent) != (self._tokens(request, place), parent)",
        "block is None", CONSTANT,
    ),
    Mutant(
        "a block is findable before it is written", block_manager,
        "num_committed_blocks, num_tokens // self", "num_committed_blocks, request.num_tokens // self", ALL,
    ),
    Mutant(
        "a block is findable when its last token is missing", block_manager,
        "num_committed_blocks, num_tokens // self", "num_committed_blocks, (num_tokens + 1) // self", ALL,
    ),
    Mutant(
        "a block too few at k * block + 1", block_manager,
        "-(-num_tokens // self.block_size)", "-(-(num_tokens - 1) // self.block_size)", ALL,
    ),
    Mutant(
        "a block too many at k * block", block_manager,
        "-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1", ALL,
    ),
    Mutant("the salt is forgotten", block_manager, "request.cache_salt", '""', ALL, times=4),
    Mutant(
        "a hit covers the whole prompt", block_manager,
        "else request.num_tokens - 1", "else request.num_tokens", ALL[::2],
    ),
    Mutant(
        "hits count as free", block_manager,
        "self.num_free - sum(block.ref_count == 0 for block in hits)", "self.num_free", ALL[::2],
    ),
    Mutant(
        "hits are evicted for the same request", block_manager,
        "self._hold(hits)\n        request.block_ids = [block.index for block in hits] + self._take(missing)",
        "taken = self._take(missing)\n        self._hold(hits)\n"
        "        request.block_ids = [block.index for block in hits] + taken", WORKLOADS,
    ),
    Mutant("the reserve is ignored", block_manager, "missing + reserve > self", "missing > self", MODELS),
    Mutant(
        "a refused growth takes what there is", block_manager,
        "if missing > self.num_free:\n            return False",
        "if missing > self.num_free:\n            request.block_ids += self._take(self.num_free)\n"
        "            return False", MODELS,
    ),
    Mutant(
        "a duplicate forgets the chain", block_manager,
        "request.chain_parent = known.serial", "pass", EXAMPLES,
    ),
    Mutant(
        "a reset leaves the index", block_manager,
        "self._forget(self._blocks[index])\n            self._blank", "self._blank", MODELS,
    ),
    Mutant("a reset while blocks are held", block_manager, "if self.num_held:", "if False:", MODELS),
    # the scheduler
    Mutant("the last of the queue goes first", scheduler, "waiting[passed]", "waiting[~passed]", WORKLOADS, times=2),
    Mutant(
        "a victim keeps its count of computed tokens", block_manager,
        "request.num_computed_tokens = request.num_committed_blocks = 0", "request.num_committed_blocks = 0", ALL[::2],
    ),
    Mutant("the first is preempted", scheduler, "self.running.pop()", "self.running.pop(0)", WORKLOADS),
    Mutant("a victim keeps its blocks", scheduler, "self.blocks.free(victim)", "pass", WORKLOADS),
    Mutant(
        "a victim goes to the end of the queue", scheduler,
        "insort(self.waiting, victim, key=_order)", "self.waiting.append(victim)", WORKLOADS,
    ),
    Mutant(
        "cached tokens cost budget", scheduler,
        "budget -= size\n\n        late", "budget = max(0, budget - request.num_computed_tokens)\n\n        late",
        WORKLOADS,
    ),
    Mutant(
        "a newcomer costs no budget", scheduler,
        "budget -= size\n\n        late", "pass\n\n        late", WORKLOADS,
    ),
    Mutant(
        "an aborted request stays in its queue", scheduler,
        "(self.running if request.status is Status.RUNNING else self.waiting).remove(request)",
        "if reason != 'abort':\n            (self.running if request.status is Status.RUNNING else self.waiting)"
        ".remove(request)", WORKLOADS,
    ),
    Mutant(
        "an abort during the step is overlooked", scheduler,
        "if request.is_finished:  #", "if False:  #", WORKLOADS,
    ),
    Mutant(
        "the last short chunk is forgotten", scheduler,
        "if budget and request.status is Status.RUNNING:",
        "if budget and request.status is Status.RUNNING and not 1 < request.num_uncomputed_tokens < 4:", WORKLOADS,
    ),
    Mutant(
        "every chunk draws a token", scheduler,
        "size == request.num_uncomputed_tokens\n", "True\n", WORKLOADS,
    ),
    Mutant("prefills go before decodes", scheduler, "in decodes + prefills", "in prefills + decodes", WORKLOADS),
    Mutant(
        "more run than the limit", scheduler,
        "min(max_num_seqs, max_num_batched_tokens)", "max_num_batched_tokens", WORKLOADS,
    ),
    Mutant(
        "whom others pass loses its place", scheduler,
        "passed < min(len(self.waiting), self.max_running - len(self.running))",
        "passed < len(self.waiting) and len(self.running) < self.max_running", WORKLOADS,
    ),
    Mutant(
        "one waits for the prefix of a later one", block_manager,
        "coming.get(self._digest(request, place), turn) < turn", "self._digest(request, place) in coming", ("order",),
    ),
    Mutant(
        "one waits for a little prefix", block_manager,
        "and (2 * place - known) * self.block_size >= request.num_tokens", "", WORKLOADS,
    ),
    Mutant("priorities are ignored", scheduler, "request.priority if self._by_priority else 0", "0", WORKLOADS),
    Mutant("waiting counts for nothing", scheduler, "* self._patience + self.num_steps", "", WORKLOADS),
    Mutant("the clock stands still", scheduler, "self.num_steps += 1", "pass", WORKLOADS),
    Mutant("waiting counts double", scheduler, "+ self.num_steps", "+ 2 * self.num_steps", WORKLOADS),
    Mutant("a victim starts to wait anew", scheduler, "victim.num_preemptions += 1", "victim.num_preemptions += 1\n"
           "            victim.rank += self.num_steps", WORKLOADS),
    Mutant(
        "an interrupted step counts as computed", scheduler,
        "span.request.num_computed_tokens = span.start", "pass", WORKLOADS,
    ),
    Mutant(
        "blocks are findable when they are planned", scheduler,
        "budget -= size\n\n        late",
        "budget -= size\n            self.blocks.commit(request, request.num_tokens)\n\n        late",
        WORKLOADS,
    ),
    # steps that overlap
    Mutant(
        "a pending token stays pending", scheduler,
        "request.num_pending_tokens -= span.samples\n            if request.is_finished",
        "if request.is_finished", WORKLOADS,
    ),
    Mutant(
        "an interrupted step leaves its token pending", scheduler,
        "span.request.num_pending_tokens -= span.samples\n            if not", "if not", WORKLOADS,
    ),
    Mutant(
        "blocks that a victim has lost are committed", scheduler,
        "if request.num_computed_tokens >= span.stop:", "if True:", WORKLOADS,
    ),
    Mutant(
        "the end of the pool drops a pending token", scheduler,
        "if not request.num_pending_tokens:", "if True:", WORKLOADS,
    ),
    Mutant(
        "a step is computed behind the last token allowed", scheduler,
        "if request.num_uncomputed_tokens == 1]",
        "if request.num_tokens - request.num_computed_tokens == 1]", WORKLOADS,
    ),
    Mutant(
        "whoever outgrows the pool waits for ever", scheduler,
        "if self.running:\n                    break", "if True:\n                    break", ("pins",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, id=f"{mutant.name}-{check}".replace(" ", "_"))
        for mutant in MUTANTS
        for check in mutant.found_by
    ],
)
def test_a_planted_fault_is_found(mutant, check):
    parts = mutant.parts()
    with pytest.raises(FOUND):
        CHECKS[check](*parts)


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_nothing_is_found(check, monkeypatch):
    """The same checks, on the same paths, pass on the code as it is."""
    monkeypatch.setitem(globals(), "SEARCHES", 1)
    unchanged = Mutant("none", block_manager, "import logging\n", "import logging\n", ())
    CHECKS[check](*unchanged.parts())


def main():
    """Print the table: after how long each check found each fault, if it did."""
    print(f"| fault | {' | '.join(CHECKS)} |\n|{' --- |' * (len(CHECKS) + 1)}")
    for mutant in MUTANTS:
        cells = []
        for check in CHECKS.values():
            started = time.perf_counter()
            try:
                check(*mutant.parts())
                cells.append("-")
            except FOUND:
                cells.append(f"{time.perf_counter() - started:.2f} s")
        print(f"| {mutant.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

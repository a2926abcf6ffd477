"""Recordings to test with: random workloads without a model, a tiny model with a tokenizer, a stand-in for the page."""

import importlib.util
import json
import random
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError, RequestError
from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.trace.recorder import Recorder

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 256,
}  # fmt: skip


def shadow():
    """The shadow runner of the unit tests."""
    path = Path(__file__).parents[2] / "unit" / "test_scheduler.py"
    spec = importlib.util.spec_from_file_location("traced_workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SHADOW = shadow()


class Books(Observer):
    """Copies the books after each decision that the recorder has written down."""

    def __init__(self, engine, recorder):
        self.scheduler, self.recorder = engine.scheduler, recorder
        self.places = {}
        self.copies = []

    def on_arrival(self, request):
        self.places[request] = len(self.places)

    def on_decision(self, output):
        if len(self.recorder.steps) > len(self.copies):
            self.copies.append(self.copy())

    def copy(self):
        blocks = self.scheduler.blocks
        return {
            "readers": [block.ref_count for block in blocks._blocks],
            "cached": list(blocks._cached),
            "findable": {block.index for block in blocks._blocks if block.digest is not None},
            "blank": len(blocks._blank),
            "tables": {self.places[r]: list(r.block_ids) for r in self.places if r.block_ids},
            "waiting": [self.places[request] for request in self.scheduler.waiting],
            "running": [self.places[request] for request in self.scheduler.running],
        }


class Run:
    """One random workload, recorded."""

    def __init__(self, seed, **limits):
        self.dice = dice = random.Random(seed)
        self.num_blocks, self.block_size = dice.randint(3, 14), dice.choice([4, 8])
        self.blocks = BlockManager(self.num_blocks, self.block_size, enable_prefix_caching=dice.random() < 0.85)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=dice.choice([1, 3, 8, 8]), max_num_batched_tokens=dice.choice([4, 7, 16, 64]),
            policy=dice.choice(["fcfs", "priority"]), patience=dice.choice([1, 3, 1000]),
        )  # fmt: skip
        self.runner = SHADOW.ShadowRunner(self.scheduler, seed % 2)
        ends = Limits(max_model_len=1000, vocab_size=SHADOW.VOCAB, eos_token_ids=frozenset({SHADOW.END}))
        self.engine = LLMEngine(self.scheduler, self.runner, ends)
        self.pins = []
        if seed % 3 == 0:  # a recording that begins with something in the cache, and something pinned
            self.engine.add_request(None, [1, 2, 3, 4, 5, 0, 1, 2, 3], SamplingParams(max_tokens=2))
            while self.engine.has_unfinished_requests:
                self.engine.step()
            self.pin([1, 2, 3, 4])
        self.recorder = Recorder(self.engine, **limits)
        self.books = Books(self.engine, self.recorder)
        self.engine.observers += [self.recorder, self.books]
        self.counts = Counter()

    def pin(self, prompt):
        request = SHADOW.Request(
            request_id="", prompt_token_ids=prompt, params=SamplingParams(), max_tokens=1, arrival=0
        )
        self.pins.append(self.blocks.pin(request))

    def serve(self):
        dice = self.dice
        stem = [dice.randrange(SHADOW.VOCAB) for _ in range(60)]
        left = dice.randint(2, 9)
        for _ in range(3000):
            while left and (not self.engine.has_unfinished_requests or dice.random() < 0.4):
                left -= 1
                self.add(stem)
            if not self.engine.has_unfinished_requests:
                break
            alive = list(self.engine._requests)
            if dice.random() < 0.04:
                name = dice.choice(alive)
                if dice.random() < 0.5:
                    self.engine.abort(name)
                else:
                    self.runner.meanwhile.append(lambda name=name: self.engine.abort(name))
                self.counts["aborts"] += 1
            if dice.random() < 0.05 and len(self.pins) < 2 and self.num_blocks > 5:
                self.pin(stem[: 2 * self.block_size])
                self.counts["pins"] += bool(self.pins[-1])
            if self.pins and dice.random() < 0.1:
                self.blocks.unpin(self.pins.pop())
            self.step(dice.random())
            while self.runner.meanwhile:
                self.runner.meanwhile.pop()()
        else:
            raise AssertionError("the work does not end")
        while self.pins:
            self.blocks.unpin(self.pins.pop())
        if dice.random() < 0.5:
            assert self.blocks.reset_prefix_cache()
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts["evictions"] += self.blocks.num_evictions
        self.last = self.books.copy()
        self.engine.close()
        return self.recorder.recording()

    def add(self, stem):
        dice = self.dice
        shared = dice.choice([0, self.block_size, 2 * self.block_size, dice.randint(0, 20)])
        own = [dice.randrange(SHADOW.VOCAB) for _ in range(dice.choice([0, 1, 3, dice.randint(0, 20)]))]
        samples = dice.choice([1, 1, 1, 2, 3])
        params = SamplingParams(n=samples, max_tokens=dice.choice([1, 2, 8, dice.randint(1, 40)]), ignore_eos=True)
        if dice.random() < 0.3:
            params.ignore_eos = False
        try:
            self.engine.add_request(
                None, (stem[:shared] + own) or [1], params, priority=dice.randint(0, 2), stream=dice.random() < 0.3,
                cache_salt=dice.choice(["", "", "", "s"]),
            )  # fmt: skip
            self.counts["samples"] += samples > 1
        except RequestError:
            self.counts["refused"] += 1

    def step(self, luck):
        if luck < 0.03:
            self.runner.fail_with = SHADOW.Broken("planned")
        elif luck < 0.05:
            self.runner.fail_with = KeyboardInterrupt()
        elif luck < 0.07:
            self.runner.interrupt_fetch = True
        try:
            self.engine.step()
        except EngineError as error:
            assert isinstance(error.__cause__, SHADOW.Broken), error.__cause__
            self.counts["failures"] += 1
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        self.runner.fail_with, self.runner.interrupt_fetch = None, False


@pytest.fixture(scope="session")
def workload():
    """A random workload by its seed: test files cannot import each other."""
    return Run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model's folder, without weights, with a byte-level tokenizer: each byte is a token."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(TINY))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.save(str(made / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return made


@pytest.fixture
def open_llm(folder):
    """Open the tiny model; what a test leaves open is closed."""
    opened = []

    def open_one(**options):
        defaults = dict(load_format="dummy", dtype="float32", block_size=8, num_gpu_blocks_override=32)
        opened.append(LLM(folder, **{**defaults, **options}))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


@pytest.fixture(autouse=True)
def page(monkeypatch):
    """The room's page if it is there, else one that holds the recording and shows nothing."""
    if importlib.util.find_spec("nanovllm.trace.page") is None:
        stand_in = types.ModuleType("nanovllm.trace.page")
        stand_in.render = lambda recording: (
            '<!doctype html><script type="application/json" id="recording">'
            + json.dumps(recording).replace("<", "\\u003c")
            + "</script>"
        )
        monkeypatch.setitem(sys.modules, "nanovllm.trace.page", stand_in)

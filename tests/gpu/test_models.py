"""The engine's log-probabilities against transformers on the same device, token by token of what the engine drew.

Teacher forcing: transformers scores prompt and output at once, and every log-probability that the engine reported on
its way, in whatever pieces and company, must be the one found there. Runs on a CPU too.

    float32     the engine and transformers in float32 differ by rounding alone
    bfloat16    both are compared with transformers in float32, on weights that bfloat16 holds exactly: the engine may
                be off by what transformers is off in bfloat16, and a half more
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.ops.linear import few_rows
from nanovllm.request import Request
from nanovllm.scheduler import SchedulerOutput, Span

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # transformers has warnings of its own, others in each version

SHAPE = dict(
    vocab_size=1009, intermediate_size=640, num_hidden_layers=4, max_position_embeddings=1024, initializer_range=0.05,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
"""At this width a spread of 0.05 lets logits spread over 1 or so; at the usual 0.02 they hide faults."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
    "qwen2": ("Qwen2Config", dict(hidden_size=320, num_attention_heads=4, num_key_value_heads=1)),  # head_dim 80
    "qwen3": (
        "Qwen3Config",
        dict(hidden_size=384, num_attention_heads=6, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True,
             intermediate_size=1024),  # a product that is computed in parts at some numbers of rows
    ),
}  # fmt: skip
LENGTHS = (1, 7, 64, 65, 200)
"""Of prompts: alone in a span, around a block, and longer than a step of ``chunks``."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 48},
    "small blocks": {"block_size": 16},
    "eager": {"enforce_eager": True},
}
ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 32, 33, 63, 64, 65, 128, 129, 255, 256)
"""On both sides of each number of rows from which on something else computes them."""

# float32: transformers' own eager and fused attention lie up to 1.4e-5 apart at this spread
MOST, MEAN = 1e-4, 1e-5
# bfloat16, whatever transformers does: the bounds that vLLM sets itself against it
WIDEST_MOST, WIDEST_MEAN = 0.5, 0.1


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poison: transformers is run here too, and thousands of small calls."""
    monkeypatch.setattr(torch, "empty_like", torch.ops.aten.empty_like.default)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_pair("qwen3", tmp_path_factory.mktemp("model"))


def make_pair(family: str, folder: Path) -> SimpleNamespace:
    """Draw a model, norms and biases too, in numbers of bfloat16; save it in float32."""
    transformers.logging.disable_progress_bar()
    name, changes = FAMILIES[family]
    torch.manual_seed(list(FAMILIES).index(family))
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**SHAPE | changes), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return SimpleNamespace(folder=folder, model=model)


def open_llm(pair: SimpleNamespace, device: str, dtype: str, **options: Any) -> LLM:
    defaults = dict(device=device, dtype=dtype, skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=256,
                    num_gpu_blocks_override=2048)  # fmt: skip
    return LLM(pair.folder, **defaults | options)


def draw_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1009, (length,), generator=generator).tolist() for length in lengths]


def greedy(tokens: int, logprobs: int | None = 5) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


Scores = dict[tuple[int, ...], torch.Tensor]
"""Prompt and output -> the log-probabilities of all tokens after each of them, float32 [tokens, vocab]."""


def sequence(output: RequestOutput) -> tuple[int, ...]:
    return (*output.prompt_token_ids, *output.token_ids)


@torch.inference_mode()
def scores(pair: SimpleNamespace, outputs: list[RequestOutput], device: str, dtype: str) -> Scores:
    """Let transformers score each distinct prompt with its output; those of one length together."""
    model = copy.deepcopy(pair.model).to(device)
    for parameter in model.parameters():  # not the frequencies of rotation: transformers keeps these in float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    distinct: dict[int, list[tuple[int, ...]]] = {}
    for tokens in dict.fromkeys(map(sequence, outputs)):
        distinct.setdefault(len(tokens), []).append(tokens)
    found: Scores = {}
    for group in distinct.values():
        logits = model(torch.tensor(group, device=device)).logits
        found |= zip(group, logits.float().log_softmax(-1).cpu(), strict=True)
    return found


@dataclass
class Found:
    """What a run of the engine said, beside what transformers says of the same tokens."""

    ours: torch.Tensor
    """Log-probabilities that the engine reported: of each drawn token and of the best."""
    exact: torch.Tensor
    """Those of transformers in float32."""
    theirs: torch.Tensor
    """Those of transformers in the type of the run."""
    gaps: torch.Tensor
    """By how much the best token in float32 is better than the drawn one, in its log-probability."""


def compare(outputs: list[RequestOutput], exact: Scores, theirs: Scores) -> Found:
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for output in outputs:
        first = len(output.prompt_token_ids) - 1  # the place after which the first token was drawn
        for place, token in enumerate(output.token_ids, first):
            there = exact[sequence(output)][place]
            parts[3].append(there.max() - there[token])
        for place, entries in enumerate(output.outputs[0].logprobs or (), first):
            tokens = list(entries)
            parts[0].append(torch.tensor([entry.logprob for entry in entries.values()]))
            parts[1].append(exact[sequence(output)][place, tokens])
            parts[2].append(theirs[sequence(output)][place, tokens])
    return Found(*(torch.cat(part) if part else torch.empty(0) for part in parts[:3]), torch.stack(parts[3]))


def bounds(found: Found, dtype: str) -> tuple[float, float]:
    """Return how large an error may be, and how large the mean of all."""
    if dtype == "float32":
        return MOST, MEAN
    allowed = (found.theirs - found.exact).abs()
    assert allowed.max() > 1e-3, "transformers has not computed in bfloat16"
    return min(2 * float(allowed.max()), WIDEST_MOST), min(1.5 * float(allowed.mean()), WIDEST_MEAN)


def check(found: Found, most: float, mean: float) -> None:
    assert found.ours.numel() and found.ours.isfinite().all()
    errors = (found.ours - found.exact).abs()
    assert float(errors.max()) < most and float(errors.mean()) < mean, f"{errors.max()} and {errors.mean()} on average"
    check_gaps(found, most)


def check_gaps(found: Found, most: float) -> None:
    """A greedy token may be another than the best one where rounding could have put it in front."""
    assert float(found.gaps.max()) < 2 * most, f"a drawn token is {found.gaps.max()} below the best"


each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
EAGER, SMALL_BLOCKS = (pytest.param(way, marks=pytest.mark.gpu) for way in ("eager", "small blocks"))
"""A CPU has no graphs to do without, and tests/models cuts its blocks."""


@each_dtype
@pytest.mark.parametrize("way", ["plain", "chunks", SMALL_BLOCKS, EAGER])
def test_log_probabilities_are_those_of_transformers(pair: SimpleNamespace, device: str, dtype: str, way: str) -> None:
    """Alone and together, with log-probabilities and without: on a GPU these have graphs of their own."""
    prompts = draw_prompts(*LENGTHS)
    with open_llm(pair, device, dtype, **WAYS[way]) as llm:
        outputs = llm.generate(prompts, greedy(16), use_tqdm=False)
        alone = [llm.generate([prompt], greedy(8), use_tqdm=False)[0] for prompt in prompts[2:]]
        plain = llm.generate(prompts, greedy(16, None), use_tqdm=False)
    assert alone[-1].num_cached_tokens > 0, "the first blocks of the longest prompt were known"
    every = [*outputs, *alone, *plain]
    exact = scores(pair, every, device, "float32")
    theirs = exact if dtype == "float32" else scores(pair, every, device, dtype)
    found = compare([*outputs, *alone], exact, theirs)
    most, mean = bounds(found, dtype)
    check(found, most, mean)
    check_gaps(compare(plain, exact, theirs), most)


@each_dtype
@pytest.mark.parametrize("way", ["plain", "chunks"])
def test_log_probabilities_of_prompts_are_those_of_transformers(
    pair: SimpleNamespace, device: str, dtype: str, way: str
) -> None:
    """Of all tokens of a prompt and the best ones; then of its end alone, with what comes before from the cache."""
    prompts = draw_prompts(*LENGTHS, 300)
    with open_llm(pair, device, dtype, **WAYS[way], block_size=16) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=3)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        params.prompt_logprob_start = 250
        (late,) = llm.generate(prompts[-1:], params, use_tqdm=False)
    assert late.num_cached_tokens == 240 and not any(output.num_cached_tokens for output in outputs)
    exact = scores(pair, outputs, device, "float32")
    theirs = exact if dtype == "float32" else scores(pair, outputs, device, dtype)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for output in [*outputs, late]:
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for place, (token, entries) in enumerate(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)):
            if entries is not None:
                assert next(iter(entries)) == token
                parts[0].append(torch.tensor([entry.logprob for entry in entries.values()]))
                parts[1].append(exact[sequence(output)][place - 1, list(entries)])
                parts[2].append(theirs[sequence(output)][place - 1, list(entries)])
    found = Found(*map(torch.cat, parts), torch.zeros(1))
    assert len(parts[0]) == sum(map(len, prompts)) - len(prompts) + 49
    check(found, *bounds(found, dtype))


@each_dtype
@pytest.mark.parametrize("way", ["plain", EAGER])
def test_any_number_of_rows_gives_the_same(qwen3: SimpleNamespace, device: str, dtype: str, way: str) -> None:
    """All but the last token of these prompts are in the cache, so both steps have one row for each request."""
    prompts = draw_prompts(*[17] * max(ROWS), seed=1)
    with open_llm(qwen3, device, dtype, **WAYS[way], block_size=16) as llm:
        llm.generate(prompts, greedy(1, None), use_tqdm=False)
        runs = [llm.generate(prompts[:rows], greedy(2, 1), use_tqdm=False) for rows in ROWS]
    assert all(output.num_cached_tokens == 16 for outputs in runs for output in outputs)
    every = [output for outputs in runs for output in outputs]
    exact = scores(qwen3, every, device, "float32")
    theirs = exact if dtype == "float32" else scores(qwen3, every, device, dtype)
    whole = compare(every, exact, theirs)
    most, mean = bounds(whole, dtype)
    check(whole, most, mean)
    for rows, outputs in zip(ROWS, runs, strict=True):
        try:
            check(compare(outputs, exact, theirs), most, 2 * mean if rows >= 15 else most)  # few have no mean
        except AssertionError as error:
            raise AssertionError(f"{rows} rows") from error


def test_the_rows_stand_around_our_own_thresholds() -> None:
    """A threshold that moves wants its neighbours in ``ROWS``."""
    for most in (few_rows.ROWS, few_rows.TILE_ROWS):
        assert {most, most + 1} <= set(ROWS)
    fewest, most = few_rows.IN_PARTS
    assert {fewest - 1, fewest, most} <= set(ROWS)
    qwen3 = SHAPE | FAMILIES["qwen3"][1]
    parts = [few_rows.choose_parts(rows, qwen3["hidden_size"], qwen3["intermediate_size"]) for rows in ROWS]
    assert [rows for rows, number in zip(ROWS, parts, strict=True) if number > 1] == [65, 128, 129, 255, 256]
    kernel = pytest.importorskip("nanovllm.ops.linear.kernel", reason="needs triton")
    for most in (kernel.FEW_ROWS, kernel.FEW, kernel.MAX_ROWS):
        assert {most, most + 1} <= set(ROWS)


@pytest.mark.gpu
def test_slots_past_31_bits(tmp_path: Path) -> None:
    """Block 32,768 of 64 tokens, 8 heads and 128 channels begins at number 2**31 of the keys: 4 GiB, as the values."""
    config = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=128, num_hidden_layers=1)
    reference = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SHAPE | config))
    reference.save_pretrained(tmp_path)
    options = dict(device="cuda", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, block_size=64)
    tokens = draw_prompts(100)[0]
    with LLM(tmp_path, num_gpu_blocks_override=32_772, **options) as llm:
        runner, found = llm.llm_engine._runner, []
        for blocks in ([1, 2], [32_769, 32_771]):
            request = Request(request_id="", prompt_token_ids=tokens, params=greedy(1), max_tokens=1, arrival=0)
            request.block_ids = blocks
            spans = [Span(request, 0, 70, True), Span(request, 70, 99, True), Span(request, 99, 100, True)]
            drawn = [sampled for span in spans for sampled in runner.submit(SchedulerOutput((span,)))()]
            found.append([(sampled.token_id, sampled.scores.owns.tolist()) for sampled in drawn])
        assert found[0] == found[1] and len(found[0]) == 3
        written = runner.cache.data.flatten(3).any(-1).nonzero()[:, 2].unique().tolist()
        assert written == [1, 2, 32_769, 32_771]

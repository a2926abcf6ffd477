"""``deterministic=True``: the same bits alone and in company, from each kernel and from the whole engine."""

import json
import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams

pytest.importorskip("triton")

from nanovllm.ops.activation import gate_times_up
from nanovllm.ops.linear import invariant_kernel, prepare, reference
from nanovllm.ops.linear.invariant_kernel import TILES
from nanovllm.ops.rms_norm import add_rms_norm, rms_norm
from nanovllm.ops.rotate_and_store import rotate_and_store
from nanovllm.ops.sample import log_probs

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1009,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poison here: thousands of small calls."""
    monkeypatch.setattr(torch, "empty_like", torch.ops.aten.empty_like.default)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


# --- kernels ----------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 4096), (2048, 1024), (3072, 1024), (1000, 1009)])
def test_the_product_of_a_row_is_the_same_among_any_number(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = draw(8192, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = draw(outputs, dtype=dtype)
    product = prepare(weight, bias, dtype, deterministic=True)
    whole = product(x)
    exact = reference.linear(x.double(), weight.double(), bias.double())
    assert (whole.double() - exact).norm() / exact.norm() < {2: 4e-3, 4: 1e-5}[dtype.itemsize]
    for rows in (*range(1, 301), 511, 513, 1025, 4096):
        assert torch.equal(product(x[:rows]), whole[:rows]), f"the first {rows}"
        start = (37 * rows) % (8192 - rows)
        assert torch.equal(product(x[start : start + rows]), whole[start : start + rows]), f"{rows} from {start}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [64, 1000, 1024, 3072, 12288])
def test_all_tiles_give_the_same_bits(inputs: int, dtype: torch.dtype) -> None:
    """The property of the hardware that allows tiles of several sizes: see ``invariant_kernel``. No wide sums either:
    numbers of very different size, where another order would show at once."""
    x = draw(300, inputs, dtype=dtype) * torch.logspace(-3, 2, inputs, device="cuda")[torch.randperm(inputs)].to(dtype)
    weight = draw(520, inputs, dtype=dtype)
    expected, *others = (invariant_kernel.linear(x, weight, None, tile) for tile in TILES)
    for tile, found in zip(TILES[1:], others, strict=True):
        assert torch.equal(found, expected), f"{tile}: {int((found != expected).sum())} of {found.numel()} differ"


@each_dtype
def test_other_operations_treat_rows_apart(dtype: torch.dtype) -> None:
    """Norms, gate, rotation and log-probabilities of 700 rows, and of any few of them."""
    rows, width, heads, kv_heads, head_dim, vocab = 700, 1024, 16, 8, 128, 20_001
    x, residual, gain = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype), draw(width, dtype=dtype)
    qkv = draw(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = (draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype), 1e-6)
    cos, sin = draw(rows, 1, head_dim, dtype=dtype), draw(rows, 1, head_dim, dtype=dtype)
    logits = draw(rows, vocab, dtype=dtype, scale=4)
    tokens = torch.arange(rows, device="cuda")

    def everything(part: slice) -> list[torch.Tensor]:
        keys, values = (torch.zeros(rows, kv_heads, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        query = rotate_and_store(qkv[part], norms, cos[part], sin[part], keys, values, tokens[part])
        return [
            rms_norm(x[part], gain, 1e-6), *add_rms_norm(x[part], residual[part], gain, 1e-6),
            gate_times_up(x[part], "silu"), query, keys[part], values[part], *log_probs(logits[part], tokens[part], 5),
        ]  # fmt: skip

    whole = everything(slice(0, rows))
    for start, size in [(0, 1), (699, 1), (3, 2), (7, 8), (100, 64), (101, 65), (1, 300)]:
        for place, (few, many) in enumerate(zip(everything(slice(start, start + size)), whole, strict=True)):
            assert torch.equal(few, many[start : start + size]), (start, size, place)


# --- the engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def open_llm(folder: Path, **options: object) -> LLM:
    defaults = dict(load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, device="cuda",
                    num_gpu_blocks_override=1024, max_num_batched_tokens=200, deterministic=True)  # fmt: skip
    return LLM(folder, **{**defaults, **options})


def work(number: int = 64) -> tuple[list[list[int]], list[SamplingParams]]:
    """Mixed lengths, so that prompts of more than 200 tokens come in pieces, and some leave one token for the last."""
    rng = random.Random(5)
    lengths = [rng.choice([1, 2, 201, 401, rng.randint(3, 700)]) for _ in range(number)]
    prompts = [[rng.randrange(1009) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=place, max_tokens=rng.randint(4, 40), ignore_eos=True,
                       logprobs=5)
        for place in range(number)
    ]  # fmt: skip
    return prompts, params


def answers(llm: LLM, prompts: list, params: list) -> list[tuple]:
    """Tokens, and for each the log-probabilities of the best with their ranks: floats are compared as they are."""
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        steps = [{token: (each.logprob, each.rank) for token, each in step.items()} for step in completion.logprobs]
        found.append((completion.token_ids, steps))
    return found


def alone(llm: LLM, prompts: list, params: list) -> list[tuple]:
    return [found for pair in zip(prompts, params, strict=True) for found in answers(llm, [pair[0]], [pair[1]])]


def number_of_differences(one: list, other: list) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


OPTIONS = [
    {}, {"dtype": "float32"}, {"enable_prefix_caching": False}, {"enforce_eager": True}, {"kv_cache_dtype": "fp8"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_log_probabilities_are_the_same_bits_alone_and_among_63_others(folder: Path, options: dict) -> None:
    if "kv_cache_dtype" in options and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8")
    prompts, params = work()
    with open_llm(folder, **options) as llm:
        together = answers(llm, prompts, params)
        assert number_of_differences(alone(llm, prompts, params), together) == 0
        order = random.Random(1).sample(range(len(prompts)), len(prompts))
        shuffled = answers(llm, [prompts[place] for place in order], [params[place] for place in order])
        assert [together[place] for place in order] == shuffled


def test_the_ordinary_mode_differs_somewhere(folder: Path) -> None:
    """Without this the test above could pass for want of anything to find."""
    prompts, params = work()
    with open_llm(folder, deterministic=False, enable_prefix_caching=False) as llm:
        assert number_of_differences(alone(llm, prompts, params), answers(llm, prompts, params)) > 0


def test_graphs_pieces_and_preemption_change_no_bit(folder: Path) -> None:
    prompts, params = work()
    with open_llm(folder) as llm:
        expected = answers(llm, prompts, params)
    tight = dict(num_gpu_blocks_override=200, block_size=4, max_num_batched_tokens=67)
    for options in ({"enforce_eager": True}, {"max_num_batched_tokens": 8192}, tight):
        with open_llm(folder, **options) as llm:
            assert answers(llm, prompts, params) == expected, options
            preempted = llm.llm_engine.scheduler.num_preemptions
    assert preempted > 0


def test_contexts_that_are_cut_change_no_bit(folder: Path) -> None:
    """Alone a long context is cut for many processors; among many it is not."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1009) for _ in range(length)] for length in (1900, *[1500] * 140)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)] * len(prompts)
    options = dict(num_gpu_blocks_override=4096, max_num_batched_tokens=8192)
    with open_llm(folder, **options) as llm:
        together = answers(llm, prompts, params)
        assert answers(llm, prompts[:1], params[:1]) == together[:1]
        assert answers(llm, prompts[5:6], params[5:6]) == together[5:6]


def test_a_conversation_goes_on_with_the_same_bits_from_the_cache_and_without(folder: Path) -> None:
    prompt = [random.Random(3).randrange(1009) for _ in range(150)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=5)
    found = []
    for caching in (True, False):
        with open_llm(folder, enable_prefix_caching=caching, block_size=16) as llm:
            first = answers(llm, [prompt], [params])
            found.append([*first, *answers(llm, [[*prompt, *first[0][0], 7]], [params])])
    assert found[0] == found[1]

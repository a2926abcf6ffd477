"""The backends of flash-attn 2 and FlashAttention 3 mean the reference, through stand-ins for the two libraries.

A stand-in holds its caller to the library's documentation, down to types and strides, and computes in float32 what the
documentation says: bottom-right causal masks, windows of (left, right) tokens around a row's own place, both inclusive.
``test_attention`` runs the backends with the real libraries where they are installed.
"""

import math
import random
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.ops import attention
from nanovllm.ops.attention import find_backend, reference
from nanovllm.ops.attention.packing import rectangle

CPU = torch.device("cpu")
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32

# Both sides sum in float32, in another order, and round once.
TOLERANCE = {HALF: 1e-3, BFLOAT: 8e-3}


# --- the stand-ins ----------------------------------------------------------------------------------------------


def is_index(tensor, *shape):
    return tensor.dtype is torch.int32 and tuple(tensor.shape) == shape and tensor.is_contiguous()


def attend_one(query, keys, values, scale, causal, window_size, softcap):
    """[rows, heads, head_dim] of one request, its keys and values in order; the mask of the documentation."""
    left, right = window_size
    right = 0 if causal else right
    places = torch.arange(len(query))[:, None] + len(keys) - len(query)
    others = torch.arange(len(keys))
    seen = torch.ones(len(query), len(keys), dtype=torch.bool)
    if left >= 0:
        seen &= others >= places - left
    if right >= 0:
        seen &= others <= places + right
    group = query.shape[1] // keys.shape[1]
    heads = []
    for head in range(query.shape[1]):
        q, k, v = query[:, head].float(), keys[:, head // group].float(), values[:, head // group].float()
        scores = q @ k.T * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.where(seen, torch.tensor(-math.inf))
        heads.append(scores.softmax(-1) @ v)
    return torch.stack(heads, 1).to(query.dtype)


def gather(cache, table, length):
    """The tokens of a request in order. A block that the length does not reach is never read."""
    blocks = table[: -(-length // cache.shape[1])].long()
    assert ((blocks >= 0) & (blocks < len(cache))).all()
    return cache[blocks].flatten(0, 1)[:length]


def check_tensors(query, keys, values, page):
    assert query.dtype in (HALF, BFLOAT) and query.dtype is keys.dtype is values.dtype
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert keys.shape == values.shape and keys.shape[1] % page == 0
    assert query.shape[-1] == keys.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert query.shape[-2] % keys.shape[2] == 0


def paged_varlen(query, keys, values, starts, lengths, table, scale, causal, window_size, softcap):
    """Both libraries' work: requests with any number of rows."""
    assert scale is not None and causal is True and len(window_size) == 2
    assert ((table >= 0) & (table < len(keys))).all(), "no index leads out of the cache, used or not"
    assert starts[0] == 0 and starts[-1] == len(query) and (starts.diff() > 0).all()
    assert (lengths >= starts.diff()).all() and -(-int(lengths.max()) // keys.shape[1]) <= table.shape[1]
    outs = []
    for request, length in enumerate(lengths.tolist()):
        k, v = (gather(cache, table[request], length) for cache in (keys, values))
        outs.append(attend_one(query[starts[request] : starts[request + 1]], k, v, scale, causal, window_size, softcap))
    return torch.cat(outs)


class FlashAttention2:
    """``flash_attn`` 2.8: the two functions, with all their parameters up to the last that we give."""

    def __init__(self):
        self.calls = []

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        check_tensors(q, k, v, page=256)
        requests = len(cu_seqlens_q) - 1
        assert is_index(cu_seqlens_q, requests + 1) and is_index(cu_seqlens_k, requests + 1)
        assert block_table.dtype is torch.int32 and len(block_table) == requests and block_table.stride(-1) == 1
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        lengths = cu_seqlens_k.diff()
        assert cu_seqlens_k[0] == 0 and max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == lengths.max()
        self.calls.append(("varlen", requests))
        return paged_varlen(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, causal, window_size, softcap)

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        assert k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None
        check_tensors(q, k_cache, v_cache, page=256)
        requests, rows, heads, head_dim = q.shape
        assert is_index(cache_seqlens, requests)
        assert block_table.dtype is torch.int32 and len(block_table) == requests and block_table.stride(-1) == 1
        starts = torch.arange(requests + 1) * rows
        self.calls.append(("kvcache", requests))
        return paged_varlen(
            q.reshape(-1, heads, head_dim), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale,
            causal, window_size, softcap,
        ).view(q.shape)  # fmt: skip


class FlashAttention3:
    """``flash_attn_interface``: the one function, with its parameters in their order."""

    def __init__(self):
        self.calls = []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    ):  # fmt: skip
        assert k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is cu_seqlens_k_new is None
        check_tensors(q, k_cache, v_cache, page=1)
        assert q.dim() == 3 and q.shape[-1] in (64, 96, 128, 192, 256)
        requests = len(cu_seqlens_q) - 1
        assert is_index(cu_seqlens_q, requests + 1) and is_index(cache_seqlens, requests)
        assert page_table.dtype is torch.int32 and len(page_table) == requests and page_table.stride(-1) == 1
        assert type(max_seqlen_q) is int and max_seqlen_q == cu_seqlens_q.diff().max()
        self.calls.append(("kvcache", requests))
        return paged_varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            cache_seqlens,
            page_table,
            softmax_scale,
            causal,
            window_size,
            softcap,
        )


LIBRARIES = {
    "flash_attn": ("flash_attn", FlashAttention2, "nanovllm.ops.attention.flash"),
    "flash_attn_3": ("flash_attn_interface", FlashAttention3, "nanovllm.ops.attention.flash3"),
}


def install(name, monkeypatch):
    """Put the stand-in where the library would be, and forget the backend, which has imported the other."""
    library, kind, backend = LIBRARIES[name]
    module, made = ModuleType(library), kind()
    for function in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        if hasattr(made, function):
            setattr(module, function, getattr(made, function))
    monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setitem(sys.modules, backend, None)  # so that it is put back even if it was not there
    del sys.modules[backend]
    return made


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


@pytest.fixture(params=LIBRARIES)
def backend(request, monkeypatch, hopper):
    """Name, module and stand-in of each of the two."""
    library = install(request.param, monkeypatch)
    return SimpleNamespace(name=request.param, module=find_backend(request.param, "cuda"), library=library)


# --- the backends mean the reference ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    tables: list[list[int]]

    def by_reference(self, scale, window, softcap=None):
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()])
        longest = max(map(len, self.tables))
        table = torch.tensor([row + [-1] * (longest - len(row)) for row in self.tables])
        contexts = torch.tensor(self.context_lens)
        return reference.attend(self.query, self.keys, self.values, starts, contexts, table, scale, window, softcap)

    def plan(self, module):
        return module.plan(self.query_lens, self.context_lens, self.tables, self.keys.shape[1], CPU)


def make_case(query_lens, context_lens, *, block_size=256, kv_heads=2, group=2, head_dim=64, dtype=HALF, seed=0):
    """Draw a case: blocks anywhere in the pool, query rows cut out of wider ones, NaN wherever no token lies."""
    torch.manual_seed(seed)
    # every second table has a block more than its tokens need, and then the -1 that pads a table
    sizes = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(sizes) + len(sizes) + 3
    ids = random.Random(seed).sample(range(num_blocks), num_blocks)
    tables, used = [], 0
    for place, size in enumerate(sizes):
        tables.append(ids[used : used + size] + ([ids[used + size], -1] if place % 2 else []))
        used += size + 1
    shape = (num_blocks, block_size, kv_heads, head_dim)
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    for context, table in zip(context_lens, tables, strict=True):
        slots = torch.tensor([table[place // block_size] * block_size + place % block_size for place in range(context)])
        for cache in (keys, values):
            cache.view(-1, kv_heads, head_dim)[slots] = torch.randn(context, kv_heads, head_dim)
    wide = torch.randn(sum(query_lens), kv_heads * group + 3, head_dim).to(dtype)
    query = wide[:, 1 : 1 + kv_heads * group]
    return Case(query, keys.to(dtype), values.to(dtype), list(query_lens), list(context_lens), tables)


def check(case, backend, *windows, scale=None, softcap=None):
    scale = case.query.shape[2] ** -0.5 if scale is None else scale
    plan = case.plan(backend.module)
    for window in windows or (None,):
        out = backend.module.attend(case.query, case.keys, case.values, plan, scale, window, softcap=softcap)
        assert out.dtype is case.query.dtype and out.is_contiguous()
        bound = TOLERANCE[out.dtype]
        torch.testing.assert_close(out, case.by_reference(scale, window, softcap), rtol=bound, atol=bound)


STEPS = {
    "first token": ([1], [1]),
    "one decode": ([1], [300]),
    "decodes": ([1, 1, 1, 1], [255, 256, 257, 600]),
    "whole prompt": ([33], [33]),
    "whole prompts": ([5, 16, 33], [5, 16, 33]),
    "one chunk": ([6], [300]),
    "chunks and cached prefixes": ([2, 8, 31], [21, 520, 256]),
    "decodes first": ([1, 1, 1, 12, 3], [2, 300, 128, 30, 3]),
    "a prompt of one token last": ([1, 7, 1], [300, 40, 1]),
    "in disorder": ([1, 7, 1, 12, 1, 3, 1], [2, 7, 33, 300, 16, 3, 270]),
}


@pytest.mark.parametrize("step", ["decodes", "whole prompts", "one chunk"])
def test_capped_scores(step, backend):
    check(make_case(*STEPS[step]), backend, None, 5, softcap=0.7)


@pytest.mark.parametrize("step", STEPS)
def test_steps_of_every_kind(step, backend):
    check(make_case(*STEPS[step]), backend, None, 1, 2, 5, 16, 256, 1000)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_heads_and_types(group, head_dim, dtype, backend):
    case = make_case([1, 1, 5, 1], [20, 300, 21, 9], group=group, head_dim=head_dim, dtype=dtype)
    check(case, backend, None, 6)
    check(case, backend, 6, scale=0.3)


@pytest.mark.parametrize("block_size", [256, 512])
def test_blocks_of_flash_attn(block_size, monkeypatch, hopper):
    library = install("flash_attn", monkeypatch)
    flash = SimpleNamespace(module=find_backend("flash_attn", "cuda"), library=library)
    check(make_case([1, 3], [600, 520], block_size=block_size), flash, None, 300)


@pytest.mark.parametrize("block_size", [1, 12, 16, 128])
def test_blocks_of_flash_attn_3(block_size, monkeypatch, hopper):
    library = install("flash_attn_3", monkeypatch)
    flash = SimpleNamespace(module=find_backend("flash_attn_3", "cuda"), library=library)
    check(make_case([1, 3], [200, 150], block_size=block_size), flash, None, 70)


@pytest.mark.parametrize("seed", range(15))
def test_random_steps(seed, backend):
    draw = random.Random(seed)
    contexts = [draw.choice((1, 2, 5, 40, 255, 256, 257, 400)) for _ in range(draw.randint(1, 8))]
    queries = [draw.choice((1, 1, min(context, 50), draw.randint(1, min(context, 50)))) for context in contexts]
    case = make_case(queries, contexts, kv_heads=draw.choice((1, 3)), group=draw.choice((1, 2, 8)), seed=seed)
    check(case, backend, None, draw.choice((1, 4, 17, 256)))


def test_heads_first_in_memory(backend):
    case = make_case(*STEPS["decodes first"])
    keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (case.keys, case.values))
    assert not keys.is_contiguous()
    check(replace(case, keys=keys, values=values), backend, None, 5)


def test_the_calls_of_a_step(monkeypatch, hopper):
    library = install("flash_attn", monkeypatch)
    flash = SimpleNamespace(module=find_backend("flash_attn", "cuda"), library=library)
    for step, calls in {
        "decodes": [("kvcache", 4)],
        "whole prompts": [("varlen", 3)],
        "decodes first": [("kvcache", 3), ("varlen", 2)],
        "a prompt of one token last": [("kvcache", 1), ("varlen", 2)],
    }.items():
        library.calls.clear()
        check(make_case(*STEPS[step]), flash)
        assert library.calls == calls, step


@pytest.mark.parametrize("step", ["decodes", "whole prompts", "in disorder"])
def test_a_plan_is_sent_in_one_copy(step, backend):
    case = make_case(*STEPS[step])
    plan = case.plan(backend.module)
    tensors = [value for name in plan.__slots__ if isinstance(value := getattr(plan, name), torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.dtype is torch.int32 for tensor in tensors)


def test_tables_as_a_rectangle():
    counts = torch.tensor([2, 0, 1]).numpy()
    assert rectangle([[7, 8, 9], [], [5, -1]], counts).tolist() == [[7, 8], [0, 0], [5, 0]]
    assert rectangle([], counts[:0]).shape == (0, 1)


# --- who is chosen, and what is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "message"),
    [
        ("flash_attn", (7, 5), "this device has compute capability 7.5, and flash_attn needs 8.0 or above"),
        ("flash_attn_3", (8, 9), "this device has compute capability 8.9, and flash_attn_3 needs 9.0"),
        ("flash_attn_3", (10, 0), "this device has compute capability 10.0, and flash_attn_3 needs 9.0"),
        ("triton", (7, 5), "this device has compute capability 7.5, and triton needs 8.0 or above"),
    ],
)
def test_devices_that_a_backend_is_not_made_for(name, capability, message, monkeypatch):
    if name in LIBRARIES:
        install(name, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ConfigError) as caught:
        find_backend(name, "cuda")
    assert str(caught.value) == f"attention_backend is '{name}', but {message}; use 'auto' or 'sdpa'."
    assert (caught.value.parameter, caught.value.value) == ("attention_backend", name)


@pytest.mark.parametrize(("name", "capability"), [("flash_attn", (8, 0)), ("flash_attn", (12, 0)), ("sdpa", (7, 5))])
def test_devices_that_a_backend_is_made_for(name, capability, monkeypatch, caplog):
    if name in LIBRARIES:
        install(name, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level("INFO", logger="nanovllm.ops.attention"):
        assert hasattr(find_backend(name, "cuda", (64, None, HALF)), "attend")
    assert [record.getMessage() for record in caplog.records] == [f"attention backend: {name} (as asked)"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_cpu_is_refused_before_anyone_installs_anything(name):
    with pytest.raises(ConfigError, match=f"{name} needs a CUDA device, and this one is a cpu; use 'auto' or 'sdpa'"):
        find_backend(name, "cpu")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_there(name, monkeypatch, hopper):
    library, _, _ = LIBRARIES[name]
    install(name, monkeypatch)
    monkeypatch.delitem(sys.modules, library)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "Editable" not in str(finder)])
    with pytest.raises(ConfigError, match=f"'{name}', but {library} is not installed; use"):
        find_backend(name, "cuda")


def test_a_library_that_is_broken(monkeypatch, hopper):
    """Built for another torch, as happens; or a package that shares the name and lacks the functions."""
    install("flash_attn", monkeypatch)
    del sys.modules["flash_attn"].flash_attn_varlen_func
    with pytest.raises(ConfigError, match=r"flash_attn cannot be imported \(cannot import name 'flash_attn_varlen_"):
        find_backend("flash_attn", "cuda")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "No module named 'einops'"),
        (
            ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore"),
            "flash_attn_2_cuda.so: undefined symbol",
        ),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart.so.13: cannot open"),
    ],
)
def test_a_library_that_cannot_be_imported_is_not_called_missing(error, message, monkeypatch, hopper):
    def import_module(name):
        raise error

    monkeypatch.setattr(attention, "import_module", import_module)
    with pytest.raises(ConfigError) as caught:
        find_backend("flash_attn", "cuda")
    text = str(caught.value)
    assert f"flash_attn cannot be imported ({message}" in text and "not installed" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("flash_attn", (64, None, SINGLE), "flash_attn computes in float16 and bfloat16, and dtype is float32"),
        ("flash_attn", (60, None, HALF), "head dimensions that are multiples of 8 up to 256, and this model's is 60"),
        ("flash_attn", (264, None, HALF), "head dimensions that are multiples of 8 up to 256, and this model's is 264"),
        ("flash_attn", (64, 64, HALF), "needs a block_size that is a multiple of 256, and it is 64"),
        ("flash_attn_3", (64, None, SINGLE), "flash_attn_3 computes in float16 and bfloat16, and dtype is float32"),
        ("flash_attn_3", (80, None, HALF), "takes head dimensions 64, 96, 128, 192, 256, and this model's is 80"),
        ("triton", (320, None, HALF), "triton's kernels take head dimensions up to 256, and this model's is 320"),
        ("triton", (64, -1, HALF), "triton's kernels need a block_size of at least 1, and it is -1"),
    ],
)
def test_models_and_caches_that_a_backend_cannot_serve(name, facts, message, monkeypatch, hopper):
    if name in LIBRARIES:
        install(name, monkeypatch)
    else:
        pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(ConfigError) as caught:
        find_backend(name, "cuda", facts)
    assert message in str(caught.value) and str(caught.value).endswith("; use 'auto' or 'sdpa'.")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("flash_attn", (80, 512, BFLOAT)), ("flash_attn_3", (192, 16, HALF)), ("triton", (256, 7, SINGLE)),
        ("sdpa", (300, 7, SINGLE)),
    ],
)  # fmt: skip
def test_models_and_caches_that_a_backend_can_serve(name, facts, monkeypatch, hopper):
    if name in LIBRARIES:
        install(name, monkeypatch)
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    assert find_backend(name, "cuda", facts) is find_backend(name, "cuda")


@pytest.mark.parametrize(
    ("head_dim", "line"),
    [
        (128, "attention backend: triton (its kernels run on this device)"),
        (512, "attention backend: sdpa (triton's kernels take head dimensions up to 256, and this model's is 512)"),
    ],
)
def test_auto_takes_the_next_that_can_and_says_why(head_dim, line, monkeypatch, hopper, caplog):
    """Never one of the two libraries: they are for those who ask for them."""
    pytest.importorskip("triton", reason="triton is not installed")
    for name in LIBRARIES:
        install(name, monkeypatch)
    with caplog.at_level("INFO", logger="nanovllm.ops.attention"):
        find_backend("auto", "cuda", (head_dim, None, HALF))
    assert [record.getMessage() for record in caplog.records] == [line]

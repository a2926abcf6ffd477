"""What a kernel or an operator is for, by its name: the one table that ``nanovllm profile`` sorts by.

A GPU shows kernels: ours have a line each, those of libraries are known by a part of their names. A CPU shows PyTorch's
operators, which say less: what multiplies and adds may belong to a norm, a rotation or an activation.
"""

import re

OURS = {
    "attention": ("_decode", "_shared", "_join", "_prefill"),
    "linear": ("few_kernel", "many_kernel", "linear_kernel", "tile_kernel"),
    "norm": ("rms_norm_kernel",),
    "activation": ("gate_times_up_kernel",),
    "cache": ("rotate_kernel", "rotate_and_store_kernel", "store_kvcache_kernel"),
    "sampling": (
        "best_of_chunk_kernel", "best_of_row_kernel", "check_kernel", "list_kernel", "search_kernel", "settle_kernel",
        "log_probs_of_chunk_kernel", "log_probs_of_row_kernel", "penalize_kernel", "mask_kernel",
    ),
    "batch": ("take_tokens_kernel", "look_up_kernel", "receive_kernel", "deliver_kernel"),
}  # fmt: skip
"""Class -> our own kernels."""

KERNELS = (
    ("communication", r"nccl|all_?reduce|all_?gather"),
    ("copies", r"^mem(cpy|set)"),
    ("compiled", r"^triton_"),
    ("attention", r"flash|fmha|attention|attn"),
    ("linear", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|quantize"),
    ("norm", r"norm"),
    ("activation", r"silu|gelu|tanh"),
    ("sampling", r"softmax|arg_?max|sort|topk|radix|multinomial|distribution|cumsum|scan"),
    ("batch", r"index|gather|scatter|embedding|arange"),
    ("elementwise", r"elementwise|reduce|fill|cat|copy"),
)
"""(class, what is in the name of a library's kernel, in any case); the first that fits counts."""

OPERATORS = (
    ("attention", r"scaled_dot_product|aten::(_softmax|bmm|baddbmm)"),
    ("linear", r"linear(?!g)|mkldnn|onednn|aten::(mm|addmm|matmul)$|_int8pack|_int4pack"),
    ("norm", r"norm|rsqrt"),
    ("activation", r"silu|gelu|tanh"),
    ("sampling", r"aten::(arg|sort|topk|log|exp|bitwise|__|multinomial|uniform|cumsum|where|masked)"),
    ("cache", r"aten::(index_copy|index_put|scatter)|::store"),
    ("batch", r"aten::(index|gather|embedding|arange)"),
    ("elementwise", r"aten::(mul|add|addc|sub|div|neg|cos|sin|roll|cat|sum|mean|square|clamp|pow|copy|fill|zero|full)"),
    ("elementwise", r"aten::(gt|lt|ge|le|eq|ne|all|any|floor|remainder|max|min)"),
    ("views", r"aten::"),
)  # fmt: skip
"""(class, what is in an operator's name); the first that fits counts. The last: what only makes or names tensors."""

OTHER = "other"

CLASSES = (
    "attention", "linear", "norm", "activation", "cache", "sampling", "batch", "elementwise", "compiled",
    "communication", "copies", "views", OTHER,
)  # fmt: skip
"""In the order of the table."""


def kernel_class(name: str) -> str:
    """Return what a GPU's kernel, copy or fill is for."""
    for known, names in OURS.items():
        if name in names:
            return known
    return _first(KERNELS, name)


def operator_class(name: str) -> str:
    """Return what an operator of PyTorch is for."""
    return _first(OPERATORS, name)


def _first(table: tuple[tuple[str, str], ...], name: str) -> str:
    return next((known for known, pattern in table if re.search(pattern, name, re.IGNORECASE)), OTHER)

"""The linear layers of one decode step on one GPU: cuBLAS, and our kernels with and without norms and gates in them.

    python3 bench/linear.py                    everything, under a minute
    python3 bench/linear.py --models 0.6B --no-tiles

Shapes are those of Qwen3-0.6B and Qwen3-8B in bfloat16. The gate comes first: a product that is not what the reference
says is not timed. Then the layers of a whole model, each with weights of its own, and its head are captured in a CUDA
graph, each product reading what the last one wrote. The share is that of the bandwidth of a plain copy, counting the
weights alone, once. A second table times each product by itself, over all layers, with several tiles. Kernels are
compiled beforehand by processes side by side. A third table times products of few outputs in parts, for more rows.
The last line is JSON.

How a variant is named:

    few, units     multiply-adds (at most 4 rows), matrix units
    apart          a norm, a product or a gate: each a kernel of its own
    gate           the gate in its product; norms apart
    within         the norms too
    /0 /1 /2       ``overlap.OVERLAP``: also for norms and gates beside cuBLAS
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from common import copy_bandwidth, microseconds
from torch import Tensor

from nanovllm.ops.activation import gate_times_up
from nanovllm.ops.kernels import TRITON
from nanovllm.ops.linear import few_rows, reference
from nanovllm.ops.rms_norm import add_rms_norm, rms_norm

if TRITON:
    from nanovllm.ops import overlap
    from nanovllm.ops.linear import kernel
    from nanovllm.ops.linear.kernel import Tile

    CHOSEN = kernel.FEW_ROWS

ROWS = {"0.6B": (1, 2, 3, 4, 8, 16, 32, 64), "8B": (1, 2, 4, 8, 16, 32)}
PARTS_ROWS = (64, 96, 128, 160, 192, 224, 256)
TILE_ROWS = {"0.6B": (1, 2, 4, 8, 16, 32, 64), "8B": (1, 2, 4, 8)}
EPS = 1e-6
BUFFER_BYTES = 256 * 2**20
"""More than any L2 cache of today."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the products of a model weigh."""

    hidden: int
    qkv: int
    attention: int
    intermediate: int
    layers: int
    vocab: int = 151_936

    def bytes(self) -> int:
        """Return the bytes of all weights in 16 bits, without norms."""
        layer = self.qkv + self.attention + 3 * self.intermediate
        return 2 * self.hidden * (self.layers * layer + self.vocab)


SHAPES = {
    "0.6B": Shape(hidden=1024, qkv=4096, attention=2048, intermediate=3072, layers=28),
    "8B": Shape(hidden=4096, qkv=6144, attention=4096, intermediate=12288, layers=36),
}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Model:
    """Weights of every layer, and the ways to run a step's products over them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        sizes = {
            "qkv": (shape.qkv, shape.hidden), "o": (shape.hidden, shape.attention),
            "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
        }  # fmt: skip
        self.weights = {name: [_weight(*size) for _ in range(shape.layers)] for name, size in sizes.items()}
        self.weights["head"] = [_weight(shape.vocab, shape.hidden)]
        self.gain = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)

    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(self.weights[name] for name in ("qkv", "o", "gate_up", "down")), strict=True)

    def alone(self, multiply: Callable, x: Tensor) -> Tensor:
        """The products and nothing else; part of what one gives is what the next one takes."""
        for qkv, o, gate_up, down in self.layers():
            x = multiply(multiply(x, qkv)[:, : self.shape.attention], o)
            x = multiply(multiply(x, gate_up)[:, : self.shape.intermediate], down)
        return multiply(x, self.weights["head"][0])

    def apart(self, multiply: Callable, x: Tensor) -> Tensor:
        """Norms and gates as kernels of their own."""
        residual = torch.zeros_like(x)
        for qkv, o, gate_up, down in self.layers():
            x, residual = add_rms_norm(x, residual, self.gain, EPS)
            x = multiply(multiply(x, qkv)[:, : self.shape.attention], o)
            x, residual = add_rms_norm(x, residual, self.gain, EPS)
            x = multiply(gate_times_up(multiply(x, gate_up), "silu"), down)
        return multiply(add_rms_norm(x, residual, self.gain, EPS)[0], self.weights["head"][0])

    def gate(self, x: Tensor) -> Tensor:
        """Norms as kernels of their own, gates within the products."""
        residual = torch.zeros_like(x)
        for qkv, o, gate_up, down in self.layers():
            x, residual = add_rms_norm(x, residual, self.gain, EPS)
            x = kernel.linear(kernel.linear(x, qkv)[:, : self.shape.attention], o)
            x, residual = add_rms_norm(x, residual, self.gain, EPS)
            x = kernel.linear(kernel.gated(x, gate_up, None, "silu"), down)
        return kernel.linear(add_rms_norm(x, residual, self.gain, EPS)[0], self.weights["head"][0])

    def within(self, x: Tensor) -> Tensor:
        """Norms, gates and additions within the products."""
        for qkv, o, gate_up, down in self.layers():
            y = kernel.norm_linear(x, self.gain, EPS, qkv)
            x = kernel.plus(y[:, : self.shape.attention], x, o, None)
            x = kernel.plus(kernel.norm_gated(x, self.gain, EPS, gate_up, None, "silu"), x, down, None)
        return kernel.linear(rms_norm(x, self.gain, EPS), self.weights["head"][0])

    def variants(self, rows: int) -> dict[str, tuple["Setting", Callable[[Tensor], Tensor]]]:
        """Map each way to run a step to (what it needs set, the function)."""
        found: dict[str, tuple[Setting, Callable[[Tensor], Tensor]]] = {
            "cuBLAS, products alone": (Setting(0), partial(self.alone, F.linear)),
            "cuBLAS, apart /0": (Setting(0), partial(self.apart, F.linear)),
            "cuBLAS, apart /2": (Setting(2), partial(self.apart, F.linear)),
        }
        for level in (0, 1, 2) if self.shape.hidden < 2048 else (1, 2):
            found[f"units, gate /{level}"] = Setting(level), self.gate
            found[f"units, within /{level}"] = Setting(level), self.within
        found["units, apart /2"] = Setting(2), partial(self.apart, kernel.linear)
        if rows <= kernel.FEW:
            found["few, gate /2"] = Setting(2, few=True), self.gate
            found["few, within /2"] = Setting(2, few=True), self.within
        return found

    def product(self, name: str, weight: Tensor, tile: "Tile | None") -> Callable[[Tensor], Tensor]:
        """Return one product as a step calls it."""
        if name == "gate_up":
            return partial(kernel.gated, weight=weight, bias=None, activation="silu", tile=tile)
        return partial(kernel.linear, weight=weight, tile=tile)


@dataclass(frozen=True)
class Setting:
    """What a variant is timed with."""

    overlap: int
    few: bool = False

    def set(self) -> None:
        overlap.OVERLAP = self.overlap
        kernel.FEW_ROWS = kernel.FEW if self.few else 0


def _weight(outputs: int, inputs: int) -> Tensor:
    return normal(outputs, inputs).mul_(inputs**-0.5)


def tiles(name: str, rows: int, outputs: int, inputs: int) -> list["Tile"]:
    """Candidates for one product: for the fewest rows those of both kernels, else several of the matrix units."""
    gated = name == "gate_up"
    if rows <= kernel.FEW:
        sizes = rows, outputs // 2 if gated else outputs, inputs, gated
        return [kernel.few_tile(*sizes), kernel.many_tile(*sizes)]
    lines = (4, 8, 16) if gated else (16, 32, 64) if name == "head" else (8, 16, 32)
    tiles = -(-inputs // 1024)
    found = []
    for each in lines:
        held = 64 // max(2 * each if gated else each, rows)
        if held and each * rows <= 2048:  # beyond, sums do not fit in the registers
            found.append(Tile(each, 1024, 8, min(tiles, held)))
    held = min(2 * tiles, 64 // max(16, rows))
    return [*found, Tile(lines[1], 512, 4, held), Tile(lines[1], 512, 8, held)]


def first_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    return ((name, weights[0]) for name, weights in model.weights.items())


def check(model: Model, name: str, rows: int, tile: "Tile | None") -> None:
    """Raise AssertionError unless a product is right: 0.01 in norm is four times a rounding to bfloat16."""
    weight = model.weights[name][0]
    x = normal(rows, weight.shape[1])
    gated = name == "gate_up"
    exact = (
        reference.gated(x.double(), weight.double(), None, "silu") if gated else F.linear(x.double(), weight.double())
    )
    off = float((model.product(name, weight, tile)(x).double() - exact).norm() / exact.norm())
    assert off < 1e-2, f"{name} {tuple(weight.shape)}, {rows} rows, {tile}: off by {off:.1e}"


def check_within(model: Model, rows: int) -> None:
    """``check`` for products with the norm in front; what the norm rounds is its kernel's own, tested elsewhere."""
    x = normal(rows, model.shape.hidden)
    normed = rms_norm(x, model.gain, EPS).double()
    qkv, gate_up = model.weights["qkv"][0], model.weights["gate_up"][0]
    y, o = normal(rows, model.shape.attention), model.weights["o"][0]
    pairs = [
        (kernel.norm_linear(x, model.gain, EPS, qkv), reference.linear(normed, qkv.double())),
        (
            kernel.norm_gated(x, model.gain, EPS, gate_up, None, "silu"),
            reference.gated(normed, gate_up.double(), None, "silu"),
        ),
        (kernel.plus(y, x, o, None), F.linear(y.double(), o.double()) + x.double()),
    ]
    for out, exact in pairs:
        off = float((out.double() - exact).norm() / exact.norm())
        assert off < 1e-2, f"{rows} rows behind a norm: off by {off:.1e}"


def time_one(call: Callable[[], object], flush: Tensor) -> float:
    """Time a call, its first run left out. Microseconds."""
    call()
    return microseconds(call, flush)


def compile_share(names: list[str], share: int, shares: int, with_tiles: bool) -> None:
    """Make every ``shares``-th of the calls to come once, on one layer, so that Triton's cache on disk has them."""
    for name in names:
        model = Model(replace(SHAPES[name], layers=1))
        jobs: dict[object, tuple[Setting, int, int, Callable[[Tensor], object]]] = {}
        for rows in ROWS[name]:
            padded = 1 << (rows - 1).bit_length()
            for title, (setting, _) in model.variants(rows).items():
                setting.set()
                for product, weight in first_weights(model) if "cuBLAS" not in title else ():
                    call: Callable[[Tensor], object] = model.product(product, weight, None)
                    if "within" in title and product == "qkv":
                        call = partial(kernel.norm_linear, gain=model.gain, eps=EPS, weight=weight)
                    elif "within" in title and product == "gate_up":
                        around = {"gain": model.gain, "eps": EPS, "bias": None, "activation": "silu"}
                        call = partial(kernel.norm_gated, weight=weight, **around)
                    elif "within" in title and product != "head":
                        call = partial(_plus, weight)
                    elif "apart" in title and product == "gate_up":
                        call = partial(kernel.linear, weight=weight)
                    way = title.split(",")[1].split("/")[0]
                    key = product, padded if setting.few else max(8, padded), setting, way
                    jobs[key] = setting, rows, weight.shape[1], call
        for rows in TILE_ROWS[name] if with_tiles else ():
            for product, weight in first_weights(model):
                for tile in tiles(product, rows, *weight.shape) if rows > kernel.FEW else ():  # others are there
                    call = model.product(product, weight, tile)
                    jobs[product, rows, tile] = Setting(2), rows, weight.shape[1], call
        for level in (0, 1, 2):  # norms and gates
            jobs[level] = Setting(level), 1, model.shape.hidden, partial(model.apart, F.linear)
        for setting, rows, inputs, call in list(jobs.values())[share::shares]:
            setting.set()
            call(normal(rows, inputs))
    torch.cuda.synchronize()


def _plus(weight: Tensor, x: Tensor) -> Tensor:
    return kernel.plus(x, x[:, : weight.shape[0]], weight, None)


def compile_all(names: list[str], with_tiles: bool) -> None:
    shares = max(1, min(15, (os.cpu_count() or 2) - 1))
    command = [sys.executable, __file__, "--models", *names, *([] if with_tiles else ["--no-tiles"]), "--compile"]
    workers = [subprocess.Popen([*command, str(share), str(shares)]) for share in range(shares)]
    if any([worker.wait() for worker in workers]):
        sys.exit("compiling failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="time the linear layers of a decode step")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--no-tiles", action="store_true", help="leave out the second table")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (torch.cuda.is_available() and TRITON):
        sys.exit("bench/linear.py needs a CUDA device and Triton")
    began = time.perf_counter()
    torch.manual_seed(0)
    if options.compile:
        compile_share(options.models, *options.compile, not options.no_tiles)
        return
    compile_all(options.models, not options.no_tiles)
    compiled = round(time.perf_counter() - began, 1)
    flush = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    copy = copy_bandwidth() / 1e6  # bytes a microsecond
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; a copy moves {copy / 1e6:.2f} TB/s; compiled in {compiled} s")
    steps: dict[str, dict[str, dict[int, float]]] = {}
    cuts: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    parts: dict[str, dict[str, dict[int, dict[int, float]]]] = {}
    for name in options.models:
        model = Model(SHAPES[name])
        torch.cuda.synchronize()  # the weights are there: from now on kernels may read them before they wait
        for rows in ROWS[name]:
            for few in (False, True) if rows <= kernel.FEW else (False,):
                Setting(2, few).set()
                for product in model.weights:
                    check(model, product, rows, None)
                check_within(model, rows)
        print(f"gate: the products of {name} are what the reference says", flush=True)
        steps[name] = step_table(name, model, copy, flush)
        if not options.no_tiles:
            cuts[name] = tile_table(name, model, copy, flush)
        parts[name] = parts_table(name, model, copy, flush)
        del model
        torch.cuda.empty_cache()
    seconds = round(time.perf_counter() - began, 1)
    result = {"device": device, "copy_tb_s": round(copy / 1e6, 3), "seconds": seconds, "steps_us": steps}
    print(json.dumps({**result, "tiles_us": cuts, "parts_us": parts}))


def step_table(name: str, model: Model, copy: float, flush: Tensor) -> dict[str, dict[int, float]]:
    """Print milliseconds of a step for each way to run it and each number of rows."""
    num_bytes, each = model.shape.bytes(), ROWS[name]
    print(f"\n| {name}, ms a step (share; {num_bytes / copy / 1000:.2f} is all) | " + " | ".join(map(str, each)) + " |")
    print("| --- |" + " --- |" * len(each))
    table: dict[str, dict[int, float]] = {}
    for rows in each:
        x = normal(rows, model.shape.hidden)
        for variant, (setting, run) in model.variants(rows).items():
            setting.set()
            table.setdefault(variant, {})[rows] = round(time_one(partial(run, x), flush), 1)
    for variant, times in table.items():
        cells = [f"{times[r] / 1000:.3f} ({num_bytes / times[r] / copy:.0%})" if r in times else "-" for r in each]
        print(f"| {variant} | " + " | ".join(cells) + " |", flush=True)
    return table


def tile_table(name: str, model: Model, copy: float, flush: Tensor) -> dict[str, dict[int, dict[str, float]]]:
    """Print microseconds of one product for each tile, best first; ``*``: what ``choose`` takes."""
    overlap.OVERLAP, kernel.FEW_ROWS = 2, CHOSEN
    print(f"\n{name}, us a product: lines x columns / warps / held, * chosen")
    table: dict[str, dict[int, dict[str, float]]] = {}
    for product, weights in model.weights.items():
        outputs, inputs = weights[0].shape
        gated = product == "gate_up"
        table[product] = {}
        for rows in TILE_ROWS[name]:
            chosen = kernel.choose(rows, outputs // 2 if gated else outputs, inputs, gated)
            x = normal(rows, inputs)
            times: dict[str, float] = {}
            for tile in dict.fromkeys((chosen, *tiles(product, rows, outputs, inputs))):
                check(model, product, rows, tile)
                calls = [model.product(product, weight, tile) for weight in weights]
                took = time_one(partial(_each, calls, x), flush) / len(calls)
                mark = "*" if tile == chosen else ""
                times[f"{tile.outputs}x{tile.inputs}/{tile.warps}/{tile.held}{mark}"] = round(took, 2)
            table[product][rows] = times = dict(sorted(times.items(), key=lambda item: item[1]))
            floor = 2 * outputs * inputs / copy
            cells = " ".join(f"{cut}={took:.2f}" for cut, took in times.items())
            print(f"{product:8s} {rows:3d} rows, copy {floor:6.2f}: {cells}", flush=True)
    return table


def parts_table(name: str, model: Model, copy: float, flush: Tensor) -> dict[str, dict[int, dict[int, float]]]:
    """Print microseconds of cuBLAS's products of few outputs, whole and in parts; ``*``: what an engine takes."""
    table: dict[str, dict[int, dict[int, float]]] = {}
    for product in ("o", "down"):
        weights = model.weights[product]
        outputs, inputs = weights[0].shape
        table[product] = {}
        for rows in PARTS_ROWS:
            x, times = normal(rows, inputs), {}
            chosen = few_rows.choose_parts(rows, outputs, inputs)
            exact = F.linear(x.double(), weights[0].double())
            for number in (1, 2, 4):
                multiply = partial(few_rows.multiply_in_parts, parts=number) if number > 1 else F.linear
                found = multiply(x, weights[0]).double()
                off = float(((found if number == 1 else found.sum(0)) - exact).norm() / exact.norm())
                assert off < 1e-2, f"{product}, {rows} rows in {number} parts: off by {off:.1e}"
                calls = [partial(multiply, weight=weight) for weight in weights]
                times[number] = round(time_one(partial(_each, calls, x), flush) / len(calls), 2)
            table[product][rows] = times
            cells = " ".join(f"{number}{'*' * (number == chosen)}={took:.2f}" for number, took in times.items())
            print(f"{name} {product:8s} {rows:3d} rows, copy {2 * outputs * inputs / copy:6.2f}, parts: {cells}")
    return table


def _each(calls: list[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    return [call(x) for call in calls]


if __name__ == "__main__":
    main()

"""Draw tokens a second and milliseconds a step against the batch size, with the floor of both, as one SVG.

    nanovllm bench --sweep --json-only > sweep.json
    python docs/figures/throughput.py sweep.json docs/figures/throughput.svg

The last line of the file is JSON with a list ``sweep`` of batch_size, tokens_per_second, ms_per_step and
floor_ms_per_step. All axes are logarithmic; nothing but the standard library is needed.
"""

import json
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, GAP = 860, 380, 70, 60, 330, 250, 90
MEASURED, FLOOR, GRID, TEXT = "#1f5fa8", "#c0502d", "#dddddd", "#333333"

Points = list[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from the last at or below ``low`` to the first at or above ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max((step for step in steps if step <= low), default=steps[0])
    last = min((step for step in steps if step >= high), default=steps[-1])
    return [step for step in steps if first <= step <= last]


def panel(title: str, left: float, sizes: list[float], curves: dict[str, Points]) -> list[str]:
    """Draw one plot; ``curves`` maps a colour to its points."""
    values = [value for points in curves.values() for _, value in points]
    marks = ticks(min(values), max(values))
    low, high = math.log(marks[0]), math.log(marks[-1])
    first, last = math.log(min(sizes)), math.log(max(sizes))

    def x(size: float) -> float:
        return left + PLOT_WIDTH * ((math.log(size) - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - ((math.log(value) - low) / (high - low) if high > low else 0.5))

    made = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{escape(title)}</text>']
    for mark in marks:
        made.append(f'<path d="M{left} {y(mark):.1f}h{PLOT_WIDTH}" stroke="{GRID}"/>')
        made.append(f'<text x="{left - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:,.9g}</text>')
    for size in sizes:
        made.append(f'<path d="M{x(size):.1f} {TOP}v{PLOT_HEIGHT}" stroke="{GRID}"/>')
        made.append(f'<text x="{x(size):.1f}" y="{TOP + PLOT_HEIGHT + 18}" text-anchor="middle">{size:g}</text>')
    middle = left + PLOT_WIDTH / 2
    made.append(f'<text x="{middle}" y="{TOP + PLOT_HEIGHT + 38}" text-anchor="middle">requests in a step</text>')
    for colour, points in curves.items():
        line = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
        made.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        made += [f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for size, value in points]
    return made


def draw(found: dict) -> str:
    """Return the SVG of what ``nanovllm bench --sweep`` found."""
    rows = sorted(found.get("sweep", ()), key=lambda row: row["batch_size"])
    if not rows:
        failed = f" Rows failed: {found['errors']}." if found.get("errors") else ""
        raise ValueError(f"there is no point to draw; run nanovllm bench with --sweep.{failed}")
    sizes = [row["batch_size"] for row in rows]
    speed = {
        MEASURED: [(row["batch_size"], row["tokens_per_second"]) for row in rows],
        FLOOR: [(row["batch_size"], row["batch_size"] / row["floor_ms_per_step"] * 1e3) for row in rows],
    }
    step = {
        MEASURED: [(row["batch_size"], row["ms_per_step"]) for row in rows],
        FLOOR: [(row["batch_size"], row["floor_ms_per_step"]) for row in rows],
    }
    legend = f"{found.get('model', '')} on {found.get('device', '')}, torch {found.get('torch', '')}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20">{escape(legend)}: <tspan fill="{MEASURED}">measured</tspan>, '
        f'<tspan fill="{FLOOR}">floor from the bandwidth of a copy</tspan></text>',
        *panel("tokens a second", LEFT, sizes, speed),
        *panel("milliseconds a step", LEFT + PLOT_WIDTH + GAP, sizes, step),
        "</svg>",
        "",
    ])  # fmt: skip


def main() -> None:
    """Read the file that the first argument names and write the one that the second names."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").strip().splitlines() or [""]
    try:
        drawn = draw(json.loads(lines[-1]))
    except ValueError as error:  # no JSON, or nothing in it
        sys.exit(f"{sys.argv[1]}: {error}")
    Path(sys.argv[2]).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()

/** The timeline: all steps from left to right, by number or by time, and a lane for each request below. */

import { FONT, hatch, prepare } from "./canvas";
import { colourOf, type Theme } from "./colours";
import { PREEMPTED, RUNNING_DECODE, SPAN, type Replay } from "./replay";
import { nameOf, time, whole } from "./words";

export type Mode = "steps" | "time";

/** Where steps lie: step ``n`` fills [n, n + 1), or the time from its beginning to the next one's. */
export class Axis {
  constructor(public replay: Replay, public mode: Mode) {}

  get end(): number {
    const { steps } = this.replay.recording;
    if (!steps.length) return 1;
    return this.mode === "steps" ? steps.length : Math.max(1, steps[steps.length - 1].t[5]);
  }

  start(step: number): number {
    const { steps } = this.replay.recording;
    if (this.mode === "steps") return step;
    return step < steps.length ? steps[step].t[0] : this.end;
  }

  stop(step: number): number { return this.mode === "steps" ? step + 1 : Math.max(this.start(step + 1), this.start(step) + 1); }

  stepAt(place: number): number {
    const last = this.replay.length - 1;
    if (this.mode === "steps") return Math.max(0, Math.min(last, Math.floor(place)));
    let low = 0, high = last;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.start(middle) <= place) low = middle;
      else high = middle - 1;
    }
    return Math.max(0, low);
  }

  /** A moment of the recording, inside a step too. */
  moment(step: number, micros: number): number {
    if (this.mode === "time") return micros;
    const [began, , , , , settled] = this.replay.recording.steps[step].t;
    return step + Math.max(0, Math.min(1, (micros - began) / Math.max(1, settled - began)));
  }
}

/** The part of the axis that is seen. */
export class View {
  from = 0;
  to = 1;

  fit(axis: Axis): void { this.from = 0; this.to = axis.end; }

  zoom(axis: Axis, factor: number, about: number): void {
    const least = axis.mode === "steps" ? Math.min(8, axis.end) : Math.min(200, axis.end);
    const size = Math.min(axis.end, Math.max(least, (this.to - this.from) * factor));
    const share = (about - this.from) / (this.to - this.from || 1);
    this.place(axis, about - share * size, size);
  }

  place(axis: Axis, from: number, size = this.to - this.from): void {
    size = Math.min(size, axis.end);
    this.from = Math.max(0, Math.min(from, axis.end - size));
    this.to = this.from + size;
  }

  /** Bring a step into sight. */
  show(axis: Axis, step: number): void {
    const [start, stop] = [axis.start(step), axis.stop(step)];
    const size = this.to - this.from;
    if (start < this.from || stop > this.to) this.place(axis, start - size * (start < this.from ? 0.7 : 0.3), size);
  }
}

export const ROWS = { overview: 16, marks: 29, tokens: 42, host: 11, device: 11, blocks: 26 };
const GAP = 5;
export const CHART_HEIGHT = Object.values(ROWS).reduce((sum, height) => sum + height + GAP, 2);
export const LANE = 17;

export function gutter(width: number): number { return width < 600 ? 50 : 74; }

interface Column { prefill: number; decode: number; held: number; cached: number; arrivals: number; preempted: number; evicted: number; finished: number; first: number; last: number; }

/** The chart of a canvas without its cursor, kept for as long as nothing else changes. */
const drawn = new WeakMap<HTMLCanvasElement, { of: string; axis: Axis; theme: Theme; picture: HTMLCanvasElement }>();

/** Draw the overview and the rows of the chart. */
export function drawChart(canvas: HTMLCanvasElement, width: number, axis: Axis, view: View, cursor: number, theme: Theme): void {
  const of = `${width} ${view.from} ${view.to} ${axis.replay.length} ${window.devicePixelRatio}`;
  let kept = drawn.get(canvas);
  if (!kept || kept.of !== of || kept.axis !== axis || kept.theme !== theme) {
    kept = { of, axis, theme, picture: kept?.picture ?? document.createElement("canvas") };
    drawn.set(canvas, kept);
    drawAll(kept.picture, width, axis, view, theme);
  }
  const pen = prepare(canvas, width, CHART_HEIGHT);
  pen.drawImage(kept.picture, 0, 0, width, CHART_HEIGHT);
  if (!axis.replay.length) return;
  const left = gutter(width), inner = width - left - 8, top = 2 + ROWS.overview + GAP;
  const x = (place: number) => left + ((place - view.from) / (view.to - view.from || 1)) * inner;
  const [from, to] = [x(axis.start(cursor)), x(axis.stop(cursor))];
  pen.beginPath();
  pen.rect(left, 0, inner, CHART_HEIGHT);
  pen.clip();
  pen.fillStyle = theme.dark ? "rgba(106,176,255,.16)" : "rgba(11,98,214,.10)";
  pen.fillRect(from, top, Math.max(2, to - from), CHART_HEIGHT - top);
  needle(pen, from, to, top - 4, CHART_HEIGHT, theme);
  pen.fillStyle = theme.accent; // and where it is in the whole
  pen.fillRect(left + (axis.start(cursor) / axis.end) * inner - 0.75, 2, 1.5, ROWS.overview);
}

function drawAll(canvas: HTMLCanvasElement, width: number, axis: Axis, view: View, theme: Theme): void {
  const pen = prepare(canvas, width, CHART_HEIGHT);
  const { replay } = axis;
  const { steps, engine } = replay.recording;
  const left = gutter(width), inner = width - left - 8;
  pen.font = FONT;
  pen.textBaseline = "middle";
  const scale = inner / (view.to - view.from || 1);
  const x = (place: number) => left + (place - view.from) * scale;
  let y = 2;
  const rows: Record<string, number> = {};
  for (const [name, height] of Object.entries(ROWS)) {
    rows[name] = y;
    y += height + GAP;
  }

  const label = (text: string, row: number, height: number) => {
    pen.fillStyle = theme.soft;
    pen.textAlign = "right";
    pen.fillText(text, left - 8, row + height / 2);
  };
  label("all", rows.overview, ROWS.overview);
  label("events", rows.marks, ROWS.marks);
  label("tokens", rows.tokens, ROWS.tokens);
  label("host", rows.host, ROWS.host);
  const host = engine.device === "cpu"; // there the step is computed while it is submitted
  label(host ? "cpu" : "device", rows.device, ROWS.device);
  label("blocks", rows.blocks, ROWS.blocks);
  if (!steps.length) return;

  let most = 1;
  for (let n = 0; n < steps.length; n++) most = Math.max(most, replay.counts.prefill[n] + replay.counts.decode[n]);

  // the overview: everything, and which part is seen below
  const all = columns(replay, axis, 0, steps.length - 1, inner, (place) => (place / axis.end) * inner);
  pen.fillStyle = theme.cell;
  pen.fillRect(left, rows.overview, inner, ROWS.overview);
  for (const [at, column] of all) {
    const height = Math.sqrt((column.prefill + column.decode) / most) * (ROWS.overview - 2);
    pen.fillStyle = column.prefill > column.decode ? theme.prefill : theme.decode;
    pen.globalAlpha = 0.75;
    pen.fillRect(left + at, rows.overview + ROWS.overview - height, Math.max(1, column.last - at), height);
  }
  pen.globalAlpha = 1;
  const seen = [left + (view.from / axis.end) * inner, left + (view.to / axis.end) * inner];
  pen.fillStyle = theme.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.65)";
  pen.fillRect(left, rows.overview, seen[0] - left, ROWS.overview);
  pen.fillRect(seen[1], rows.overview, left + inner - seen[1], ROWS.overview);
  pen.strokeStyle = theme.soft;
  pen.lineWidth = 1;
  pen.strokeRect(seen[0] + 0.5, rows.overview + 0.5, Math.max(3, seen[1] - seen[0] - 1), ROWS.overview - 1);

  pen.save();
  pen.beginPath();
  pen.rect(left, 0, inner, CHART_HEIGHT);
  pen.clip();

  const first = axis.stepAt(view.from), last = axis.stepAt(view.to);

  for (const row of ["tokens", "blocks"] as const) {
    pen.strokeStyle = theme.line;
    pen.beginPath();
    pen.moveTo(left, rows[row] + ROWS[row] + 0.5);
    pen.lineTo(left + inner, rows[row] + ROWS[row] + 0.5);
    pen.stroke();
  }

  const wide = inner / Math.max(1, last - first + 1) > 3;
  for (const [at, column] of columns(replay, axis, first, last, inner, (place) => x(place) - left)) {
    const w = Math.max(1, column.last - at - (column.last - at > 3 ? 1 : 0)), px = left + at;
    const bottom = rows.tokens + ROWS.tokens;
    const decode = (column.decode / most) * (ROWS.tokens - 2), prefill = (column.prefill / most) * (ROWS.tokens - 2);
    pen.fillStyle = theme.decode;
    pen.fillRect(px, bottom - decode, w, decode);
    pen.fillStyle = theme.prefill;
    pen.fillRect(px, bottom - decode - prefill, w, prefill);

    const pool = rows.blocks + ROWS.blocks;
    const held = (column.held / (engine.num_blocks || 1)) * ROWS.blocks, cached = (column.cached / (engine.num_blocks || 1)) * ROWS.blocks;
    pen.fillStyle = theme.held;
    pen.fillRect(px, pool - held, column.last - at, held);
    pen.fillStyle = theme.dark ? "#39424f" : "#d5dbe3";
    pen.fillRect(px, pool - held - cached, column.last - at, cached);

    const centre = px + Math.min(w, 40) / 2;
    const size = wide ? 3.4 : 2.4;
    if (column.arrivals) triangle(pen, centre, rows.marks + 5, size, theme.soft);
    if (column.finished) disc(pen, centre, rows.marks + 11.5, size - 0.6, theme.device);
    if (column.evicted) diamond(pen, centre, rows.marks + 18.5, size, theme.evicted);
    if (column.preempted) cross(pen, centre, rows.marks + 25.5, size, theme.alarm);
  }

  // with many steps to a few pixels, the height of a colour is its share of the time
  const crowded = inner / Math.max(1, last - first + 1) < 4;
  if (crowded) drawShares(pen, axis, first, last, host, rows, x, theme);
  for (let n = first; n <= last && !crowded; n++) {
    const t = steps[n].t;
    for (const [i, [start, stop]] of [[t[0], t[1]], [t[1], t[2]], [t[3], t[4]], [t[4], t[5]]].entries()) {
      const a = x(axis.moment(n, start)), b = x(axis.moment(n, stop));
      pen.fillStyle = theme.phases[i];
      pen.fillRect(a, rows.host, Math.max(b - a, i === 2 ? 0.5 : 0.8), ROWS.host);
    }
    const a = x(axis.moment(n, host ? t[1] : t[2])), b = x(axis.moment(n, t[4]));
    pen.fillStyle = theme.device;
    pen.globalAlpha = n % 2 ? 0.62 : 1;
    pen.fillRect(a, rows.device, Math.max(0.6, b - a - (b - a > 3 ? 1 : 0)), ROWS.device);
    pen.globalAlpha = 1;
  }
  pen.restore();
}

function drawShares(
  pen: CanvasRenderingContext2D, axis: Axis, first: number, last: number, host: boolean, rows: Record<string, number>, x: (place: number) => number, theme: Theme,
): void {
  const { steps } = axis.replay.recording;
  for (let n = first; n <= last; ) {
    const from = Math.floor(x(axis.start(n)) / 2) * 2;
    const spent = [0, 0, 0, 0];
    let busy = 0, to = from + 2, began = steps[n].t[0], ended = began;
    for (; n <= last && x(axis.start(n)) < from + 2; n++) {
      const t = steps[n].t;
      for (const [i, [start, stop]] of [[0, 1], [1, 2], [3, 4], [4, 5]].entries()) spent[i] += t[stop] - t[start];
      busy += t[4] - t[host ? 1 : 2];
      ended = Math.max(ended, t[5]);
      to = Math.max(to, Math.ceil(x(axis.stop(n))));
    }
    const total = spent.reduce((sum, each) => sum + each, 0) || 1;
    let y = rows.host;
    for (let i = 0; i < 4; i++) {
      const height = (spent[i] / total) * ROWS.host;
      pen.fillStyle = theme.phases[i];
      pen.fillRect(from, y, to - from, height);
      y += height;
    }
    const height = Math.min(1, busy / Math.max(1, ended - began)) * ROWS.device;
    pen.fillStyle = theme.device;
    pen.fillRect(from, rows.device + ROWS.device - height, to - from, height);
  }
}

function needle(pen: CanvasRenderingContext2D, from: number, to: number, top: number, bottom: number, theme: Theme): void {
  const x = to - from > 6 ? from : (from + to) / 2;
  pen.fillStyle = theme.accent;
  pen.fillRect(Math.round(x) - 0.75, top, 1.5, bottom - top);
  if (to - from > 6) pen.fillRect(Math.round(to) - 0.75, top, 1.5, bottom - top);
}

/** Steps that fall on the same pixel, as one: the most of each number. */
function columns(replay: Replay, axis: Axis, first: number, last: number, inner: number, x: (place: number) => number): Map<number, Column> {
  const found = new Map<number, Column>();
  const { prefill, decode, held, cached, arrivals, preempted, evicted, finished } = replay.counts;
  for (let n = Math.max(0, first); n <= last; n++) {
    const from = x(axis.start(n)), to = Math.min(x(axis.stop(n)), inner + 20);
    const at = to - from > 2 ? from : Math.floor(from);
    const column = found.get(at);
    if (!column) {
      found.set(at, {
        prefill: prefill[n], decode: decode[n], held: held[n], cached: cached[n], arrivals: arrivals[n],
        preempted: preempted[n], evicted: evicted[n], finished: finished[n], first: from, last: Math.max(to, at + 1),
      });
    } else {
      if (prefill[n] + decode[n] > column.prefill + column.decode) [column.prefill, column.decode] = [prefill[n], decode[n]];
      [column.held, column.cached] = [held[n], cached[n]];
      column.arrivals += arrivals[n];
      column.preempted += preempted[n];
      column.evicted += evicted[n];
      column.finished += finished[n];
      column.last = Math.max(column.last, to);
    }
  }
  return found;
}

/** Draw the lanes that are in sight, from ``scroll`` on. */
export function drawLanes(
  canvas: HTMLCanvasElement, width: number, height: number, scroll: number, axis: Axis, view: View, cursor: number, selected: number, theme: Theme,
): void {
  const pen = prepare(canvas, width, height);
  const { replay } = axis;
  const left = gutter(width), inner = width - left - 8;
  if (!replay.length) return;
  const scale = inner / (view.to - view.from || 1);
  const x = (place: number) => left + (place - view.from) * scale;
  pen.font = FONT;
  pen.textBaseline = "middle";
  const last = replay.length - 1;
  const hatched = new Map<string, CanvasPattern>();
  const first = Math.max(0, Math.floor(scroll / LANE)), stop = Math.min(replay.lives.length, Math.ceil((scroll + height) / LANE));

  for (let index = first; index < stop; index++) {
    const life = replay.lives[index], y = index * LANE - scroll, middle = y + LANE / 2;
    const colour = colourOf(index, theme);
    if (index === selected) {
      pen.fillStyle = theme.dark ? "rgba(106,176,255,.14)" : "rgba(11,98,214,.08)";
      pen.fillRect(0, y, width, LANE);
    }
    pen.textAlign = "right";
    pen.fillStyle = index === selected ? theme.ink : theme.soft;
    const name = nameOf(life);
    pen.fillText(name.length > 8 ? `${name.slice(0, 7)}…` : name, left - 20, middle);
    pen.fillStyle = colour;
    pen.fillRect(left - 15, middle - 4, 8, 8);

    pen.save();
    pen.beginPath();
    pen.rect(left, y, inner, LANE);
    pen.clip();
    const ended = life.facts.end_step ?? (life.facts.finish ? -1 : last); // -1: before any step
    const admitted = life.admitted[0] ?? ended;
    const span = (a: number, b: number) => [x(axis.start(a)), x(axis.start(b))] as const;
    const [waits, runs] = span(Math.min(life.facts.before_step, last), Math.max(admitted, Math.min(life.facts.before_step, last)));
    if (runs > waits) {
      pen.strokeStyle = theme.faint;
      pen.setLineDash([2, 3]);
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.moveTo(waits, middle);
      pen.lineTo(runs, middle);
      pen.stroke();
      pen.setLineDash([]);
    }
    const { stretches } = life;
    if (stretches.length) {
      const [a] = span(stretches[0], stretches[0]);
      const end = x(axis.stop(Math.min(ended, last)));
      pen.fillStyle = colour;
      pen.globalAlpha = 0.4;
      pen.fillRect(a, middle - 0.75, end - a, 1.5);
      pen.globalAlpha = 1;
    }
    for (let i = 0; i < stretches.length; i += 3) {
      const what = stretches[i + 2];
      let until = stretches[i + 1];
      if (what === PREEMPTED && i + 3 >= stretches.length) until = Math.max(until, ended);
      const a = x(axis.start(stretches[i])), b = x(axis.stop(until));
      if (b < left || a > left + inner) continue;
      const w = Math.max(1, b - a - (b - a > 4 ? 0.5 : 0));
      if (what === PREEMPTED) {
        if (!hatched.has(theme.alarm)) hatched.set(theme.alarm, hatch(pen, theme.alarm));
        pen.clearRect(a, middle - 5, w, 10);
        pen.fillStyle = hatched.get(theme.alarm)!;
        pen.fillRect(a, middle - 5, w, 10);
        pen.strokeStyle = theme.alarm;
        pen.strokeRect(a + 0.5, middle - 4.5, Math.max(1, w - 1), 9);
      } else if (what === RUNNING_DECODE) {
        pen.fillStyle = colour;
        pen.globalAlpha = 0.55;
        pen.fillRect(a, middle - 2.5, w, 5);
        pen.globalAlpha = 1;
      } else {
        pen.fillStyle = colour;
        pen.fillRect(a, middle - 6, w, 12);
      }
    }
    const each = x(axis.stop(cursor)) - x(axis.start(cursor));
    if (each > 4) { // room for a tick for each step
      pen.fillStyle = theme.panel;
      const { spans } = life;
      const begin = Math.max(0, life.spansUntil(axis.stepAt(view.from)) - 1);
      for (let i = begin * SPAN; i < spans.length && x(axis.start(spans[i])) < left + inner; i += SPAN)
        pen.fillRect(x(axis.stop(spans[i])) - 1, middle - 6, 1, 12);
    }
    if (life.facts.finish && ended <= last) disc(pen, x(ended < 0 ? axis.start(0) : axis.stop(ended)) - 0.5, middle, 3.2, life.facts.finish === "error" || life.facts.finish === "abort" ? theme.alarm : theme.ink);
    pen.restore();
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, inner, height);
  pen.clip();
  needle(pen, x(axis.start(cursor)), x(axis.stop(cursor)), 0, height, theme);
  pen.restore();
}

/** What the tooltip says of a step. */
export function describeStep(axis: Axis, step: number): string[] {
  const { replay } = axis;
  const { t, failed } = replay.recording.steps[step];
  const { prefill, decode, arrivals, preempted, evicted, finished } = replay.counts;
  if (replay.recording.steps[step].after) return ["After the last step"];
  const lines = [`Step ${whole(step)}, at ${time(t[0])}, ${time(t[5] - t[0])} long`];
  lines.push(`${whole(prefill[step])} prompt and ${whole(decode[step])} decoded tokens`);
  lines.push(`decide ${time(t[1] - t[0])}, submit ${time(t[2] - t[1])}, wait ${time(t[4] - t[3])}, settle ${time(t[5] - t[4])}`);
  const marks = [[arrivals, "arrived"], [finished, "ended"], [preempted, "preempted"], [evicted, "evicted"]] as const;
  const found = marks.filter(([numbers]) => numbers[step]).map(([numbers, word]) => `${numbers[step]} ${word}`);
  if (found.length) lines.push(found.join(", "));
  if (failed) lines.push(`failed: ${failed}`);
  return lines;
}

export function triangle(pen: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  shape(pen, [[x - size, y - size], [x + size, y - size], [x, y + size]], colour);
}

export function diamond(pen: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  shape(pen, [[x, y - size], [x + size, y], [x, y + size], [x - size, y]], colour);
}

function shape(pen: CanvasRenderingContext2D, corners: [number, number][], colour: string): void {
  pen.fillStyle = colour;
  pen.beginPath();
  corners.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.fill();
}

function disc(pen: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.arc(x, y, size, 0, 7);
  pen.fill();
}

function cross(pen: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.8;
  pen.beginPath();
  pen.moveTo(x - size, y - size);
  pen.lineTo(x + size, y + size);
  pen.moveTo(x + size, y - size);
  pen.lineTo(x - size, y + size);
  pen.stroke();
}

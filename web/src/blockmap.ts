/** The map of blocks: a cell for each, in the order of their numbers, as they are after a step's decision. */

import { FONT, prepare } from "./canvas";
import { colourOf, greyOf, inkOn, type Theme } from "./colours";
import { EVICT, FREE, HOLD, TAKE, type Step } from "./format";
import type { Replay, State } from "./replay";
import { count, nameOf, spell, visible, whole } from "./words";

export interface Grid { cell: number; gap: number; across: number; rows: number; left: number; height: number; }

/** Cells as large as the room allows; past some thousands they get small, and the map scrolls. */
export function layOut(blocks: number, width: number, height: number): Grid {
  const left = 40;
  for (let cell = 52; cell >= 4; cell--) {
    const gap = cell > 14 ? 3 : cell > 7 ? 2 : 1;
    let across = Math.max(1, Math.floor((width - left) / (cell + gap)));
    if (across >= 8) across -= across % (across >= 32 ? 8 : 4); // numbers at the left are round
    const rows = Math.ceil(blocks / across);
    if (rows * (cell + gap) <= height || cell === 4) return { cell, gap, across, rows, left, height: rows * (cell + gap) };
  }
  throw new Error("unreachable: the smallest cell always fits");
}

/** What a step did to a block. */
export function changes(step: Step | undefined): Map<number, number> {
  const found = new Map<number, number>();
  if (!step) return found;
  for (let i = 0; i + 2 < step.blocks.length; i += 3) {
    const code = step.blocks[i], block = step.blocks[i + 1];
    if (code === TAKE) found.set(block, found.get(block) === EVICT ? EVICT : TAKE);
    else if (code === EVICT || code === HOLD || code === FREE) found.set(block, code);
  }
  return found;
}

/** Readers of each block, from the block tables: those beyond the first few are only counted. */
export function readersOf(state: State): Map<number, number[]> {
  const found = new Map<number, number[]>();
  for (const [request, table] of state.tables)
    for (const block of table) {
      const readers = found.get(block);
      if (readers) readers.push(request);
      else found.set(block, [request]);
    }
  return found;
}

export interface Look { selected: number; hovered: number; step: number; }

/** Draw the rows between ``scroll`` and ``scroll + height``. */
export function drawMap(
  canvas: HTMLCanvasElement, width: number, height: number, scroll: number, grid: Grid, replay: Replay, state: State, look: Look, theme: Theme,
): void {
  const pen = prepare(canvas, width, height);
  const { cell, gap, across, left } = grid;
  const pitch = cell + gap, size = replay.recording.engine.block_size, blocks = replay.recording.engine.num_blocks;
  const readers = readersOf(state), changed = changes(replay.recording.steps[look.step]);
  const lru = state.lru(), age = new Map(lru.map((block, i) => [block, lru.length > 1 ? i / (lru.length - 1) : 1]));
  const next = new Set(lru.slice(0, 1));
  const mine = new Set(look.selected >= 0 ? state.tables.get(look.selected) : []);
  const computed = new Map<number, number>();
  for (const request of state.tables.keys()) computed.set(request, replay.lives[request] ? replay.computed(replay.lives[request], look.step) : 0);
  const round = cell > 9 ? Math.min(4, cell / 6) : 0;
  pen.font = FONT;
  pen.textBaseline = "middle";

  const large = cell > 32 ? FONT.replace("11px", "13px") : FONT;
  const outlines: [number, number, number][] = []; // over all cells, so that no neighbour covers them
  const greys = Array.from({ length: 32 }, (_, i) => greyOf(i / 31, theme));
  const firstRow = Math.max(0, Math.floor(scroll / pitch)), lastRow = Math.min(grid.rows, Math.ceil((scroll + height) / pitch));
  const every = Math.max(1, Math.ceil(14 / pitch));
  for (let row = firstRow; row < lastRow; row++) {
    const y = row * pitch - scroll;
    if (row % every === 0) {
      pen.font = FONT;
      pen.textAlign = "right";
      pen.fillStyle = theme.faint;
      pen.fillText(String(row * across), left - 8, y + cell / 2 + 0.5);
    }
    for (let block = row * across; block < Math.min(blocks, (row + 1) * across); block++) {
      const x = left + (block - row * across) * pitch;
      const box = (inset = 0) => {
        pen.beginPath();
        if (round) pen.roundRect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset, round);
        else pen.rect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset);
      };
      const fill = () => {
        if (!round) return pen.fillRect(x, y, cell, cell);
        box();
        pen.fill();
      };
      const held = state.readers[block], who = readers.get(block) ?? [];
      const dimmed = mine.size > 0 && held > 0 && !mine.has(block);
      pen.globalAlpha = dimmed ? 0.42 : 1;
      if (held > 0) {
        const shown = who.length ? (look.selected >= 0 && mine.has(block) ? [look.selected, ...who.filter((each) => each !== look.selected)] : who).slice(0, 4) : [-1];
        let filled = 1;
        if (round) {
          pen.save();
          box();
          pen.clip();
        }
        for (let i = 0; i < shown.length; i++) {
          const request = shown[i], w = cell / shown.length;
          const table = state.tables.get(request);
          const place = table ? table.indexOf(block) : -1;
          const full = place < 0 || state.findable[block] ? 1 : Math.max(0, Math.min(1, ((computed.get(request) ?? 0) - place * size) / size));
          filled = full;
          pen.fillStyle = colourOf(request, theme);
          const strength = pen.globalAlpha;
          if (full < 1) {
            pen.globalAlpha = strength * 0.28;
            pen.fillRect(x + i * w, y, w, cell);
            pen.globalAlpha = strength;
          }
          pen.fillRect(x + i * w, y + cell * (1 - full), w, cell * full);
        }
        if (shown.length > 1 && cell >= 7) {
          pen.fillStyle = theme.panel;
          for (let i = 1; i < shown.length; i++) pen.fillRect(x + (i * cell) / shown.length - 0.5, y, 1, cell);
        }
        if (round) pen.restore();
        if (cell >= 17) {
          pen.font = large;
          pen.textAlign = "center";
          if (!who.length || held > 1 || filled > 0.5) pen.fillStyle = inkOn(shown[0], theme);
          else pen.fillStyle = theme.ink;
          if (dimmed) {
            pen.globalAlpha = 1;
            pen.fillStyle = theme.soft;
          }
          const label = held > 1 ? `×${held}` : who.length ? nameOf(replay.lives[who[0]]) : "pin";
          if (label.length <= cell / 6.5) {
            if (held > 1 && !dimmed) {
              pen.lineWidth = 3;
              pen.strokeStyle = "rgba(0,0,0,.55)";
              pen.fillStyle = "#fff";
              pen.strokeText(label, x + cell / 2, y + cell / 2 + 0.5);
            }
            pen.fillText(label, x + cell / 2, y + cell / 2 + 0.5);
          }
        }
      } else if (state.released[block]) {
        pen.fillStyle = greys[Math.round((age.get(block) ?? 0) * 31)];
        fill();
        if (cell >= 11) { // a cached block has a fold, so that it is not told by its grey alone
          pen.fillStyle = theme.panel;
          pen.beginPath();
          pen.moveTo(x + cell - cell * 0.34, y);
          pen.lineTo(x + cell, y);
          pen.lineTo(x + cell, y + cell * 0.34);
          pen.fill();
        }
        if (next.has(block)) {
          pen.setLineDash([2, 2]);
          pen.strokeStyle = theme.soft;
          pen.lineWidth = 1.2;
          box(0.6);
          pen.stroke();
          pen.setLineDash([]);
        }
      } else {
        pen.fillStyle = theme.cell;
        fill();
        if (cell > 7) {
          box(0.5);
          pen.strokeStyle = theme.line;
          pen.lineWidth = 1;
          pen.stroke();
        }
      }
      pen.globalAlpha = 1;
      if (changed.has(block)) outlines.push([changed.get(block)!, x, y]);
      if (block === look.hovered) {
        pen.strokeStyle = theme.ink;
        pen.lineWidth = 2;
        box(-1.5);
        pen.stroke();
      }
    }
  }
  for (const [change, x, y] of outlines) outline(pen, change, x, y, cell, round, theme);
}

/** What a step did to a block, around its cell: a line for taken, a thick one with corners for evicted, two for shared, dots for given back. */
function outline(pen: CanvasRenderingContext2D, change: number, x: number, y: number, cell: number, round: number, theme: Theme): void {
  const ring = (out: number) => {
    pen.beginPath();
    pen.roundRect(x - out, y - out, cell + 2 * out, cell + 2 * out, round ? round + out : 0);
    pen.stroke();
  };
  const small = cell < 8;
  pen.lineWidth = 1.6;
  if (change === TAKE) {
    pen.strokeStyle = theme.ink;
    ring(0.8);
  } else if (change === EVICT) {
    pen.strokeStyle = theme.alarm;
    pen.lineWidth = 2;
    ring(small ? 1.2 : 0.8);
    if (cell >= 11) {
      pen.fillStyle = theme.alarm;
      pen.beginPath();
      pen.moveTo(x - 1.5, y - 1.5);
      pen.lineTo(x + cell * 0.42, y - 1.5);
      pen.lineTo(x - 1.5, y + cell * 0.42);
      pen.fill();
    }
  } else if (change === HOLD) {
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 1;
    ring(small ? 0 : 1.2);
    if (!small) ring(-1.6);
  } else if (change === FREE) {
    pen.strokeStyle = theme.soft;
    pen.lineWidth = 1.2;
    pen.setLineDash([1.5, 2.5]);
    ring(small ? 0 : 0.8);
    pen.setLineDash([]);
  }
}

export function blockAt(grid: Grid, blocks: number, x: number, y: number): number {
  const pitch = grid.cell + grid.gap;
  const column = Math.floor((x - grid.left) / pitch), row = Math.floor(y / pitch);
  const block = row * grid.across + column;
  return column < 0 || column >= grid.across || row < 0 || block >= blocks ? -1 : block;
}

/** A block in words: its state, its readers, the text it holds. */
export function describeBlock(replay: Replay, state: State, block: number, step: number): string[] {
  const held = state.readers[block], size = replay.recording.engine.block_size;
  const lines: string[] = [];
  const who = readersOf(state).get(block) ?? [];
  const name = (request: number) => nameOf(replay.lives[request]);
  if (held) {
    const whom = who.slice(0, 6).map(name).join(", ") + (who.length > 6 ? ", …" : "");
    lines.push(`Block ${whole(block)}: held by ${count(held, "reader")}`);
    if (who.length) lines.push(`${who.length === 1 ? "request" : "requests"} ${whom}${state.pins[block] ? ", and a pin" : ""}; place ${state.tables.get(who[0])!.indexOf(block)} of the table`);
    lines.push(state.findable[block] ? "full; later prompts can find it" : "cannot be found: not full, or not written yet");
  } else if (state.released[block]) {
    const lru = state.lru(), place = lru.indexOf(block) + 1;
    lines.push(`Block ${whole(block)}: cached, nobody reads it`);
    lines.push(place === 1 ? `the next to be evicted, of ${whole(lru.length)}` : `evicted after ${whole(place - 1)} others, of ${whole(lru.length)}`);
  } else {
    lines.push(`Block ${whole(block)}: blank`);
  }
  const change = changes(replay.recording.steps[step]).get(block);
  const did: Record<number, string> = { [TAKE]: "taken in this step", [HOLD]: "shared in this step", [FREE]: "given back in this step", [EVICT]: "evicted and taken in this step" };
  if (change !== undefined) lines.push(did[change]);
  const text = held || state.released[block] ? textOf(replay, state, block, step, size, who) : "";
  if (text) lines.push(`“${text}”`);
  return lines;
}

/** The text of the tokens that a block holds, as far as they were computed. */
function textOf(replay: Replay, state: State, block: number, step: number, size: number, who: number[]): string {
  const request = state.writer[block] >= 0 ? state.writer[block] : (who[0] ?? -1);
  const life = replay.lives[request];
  if (!life) return "";
  const place = state.place[block];
  const tokens = [...life.facts.prompt.slice(place * size, (place + 1) * size)];
  for (const [at, token] of replay.drawn(life, step)) if (at >= place * size && at < (place + 1) * size) tokens.push(token);
  const until = state.findable[block] ? size : Math.max(0, replay.computed(life, step) - place * size);
  return visible(spell(tokens.slice(0, until), replay.recording.texts).join(""));
}

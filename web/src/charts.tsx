/** The three canvases, and what a pointer does on them. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { blockAt, describeBlock, drawMap, layOut, readersOf } from "./blockmap";
import { useSize, useWheel } from "./hooks";
import type { Player } from "./player";
import { CHART_HEIGHT, describeStep, drawChart, drawLanes, gutter, LANE, ROWS } from "./timeline";
import { count, finish, nameOf, whole } from "./words";

export function Timeline({ player }: { player: Player }) {
  const [box, width] = useSize<HTMLDivElement>();
  const [scroller, , laneHeight] = useSize<HTMLDivElement>();
  const chart = useRef<HTMLCanvasElement>(null), lanes = useRef<HTMLCanvasElement>(null);
  const [scroll, setScroll] = useState(0);
  const drag = useRef<"scrub" | "pan" | null>(null);
  const { axis, view, cursor, selected, theme, replay } = player;

  useLayoutEffect(() => {
    if (!width) return;
    drawChart(chart.current!, width, axis, view, cursor, theme);
    drawLanes(lanes.current!, width, Math.min(laneHeight, Math.max(LANE, replay.lives.length * LANE)), scroll, axis, view, cursor, selected, theme);
  });
  useEffect(() => { // a request selected elsewhere comes into sight
    const element = scroller.current;
    if (!element || selected < 0) return;
    const y = selected * LANE;
    if (y < element.scrollTop || y + LANE > element.scrollTop + element.clientHeight) element.scrollTop = y - element.clientHeight / 2;
  }, [selected]);

  useEffect(() => { // and if all lanes in sight are of others, long gone or to come, those that live now do
    const element = scroller.current;
    if (!element || !replay.length) return;
    const first = Math.floor(element.scrollTop / LANE), count = Math.floor(element.clientHeight / LANE);
    const lives = (life: (typeof replay.lives)[number]) => life.facts.before_step <= cursor && !replay.hasEnded(life, cursor);
    if (replay.lives.slice(first, first + count).some(lives)) return;
    const next = replay.lives.findIndex(lives);
    if (next >= 0) element.scrollTop = next * LANE;
  }, [cursor, replay]);

  const left = gutter(width), inner = Math.max(1, width - left - 8);
  const place = (x: number) => view.from + ((x - left) / inner) * (view.to - view.from);
  const inOverview = (y: number) => y < ROWS.overview + 4;
  const pan = (x: number) => {
    const size = view.to - view.from;
    view.place(axis, ((x - left) / inner) * axis.end - size / 2, size);
    player.changed();
  };
  const pointer = (event: PointerEvent, canvas: HTMLCanvasElement) => {
    const bounds = canvas.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top] as const;
  };
  const move = (event: PointerEvent) => {
    const [x, y] = pointer(event, chart.current!);
    if (drag.current === "pan") return pan(x);
    if (drag.current === "scrub") return player.go(axis.stepAt(place(x)));
    const known = replay.length && x >= left && !inOverview(y);
    player.say(known ? { x: event.clientX, y: event.clientY, lines: describeStep(axis, axis.stepAt(place(x))) } : null);
  };
  const down = (event: PointerEvent) => {
    const [x, y] = pointer(event, chart.current!);
    if (!replay.length || x < left) return;
    chart.current!.setPointerCapture(event.pointerId);
    player.pause();
    drag.current = inOverview(y) ? "pan" : "scrub";
    player.say(null);
    if (drag.current === "pan") pan(x);
    else player.go(axis.stepAt(place(x)));
  };
  const wheel = (event: WheelEvent) => {
    const x = event.clientX - box.current!.getBoundingClientRect().left;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      player.zoom(Math.exp(event.deltaY * 0.0022), place(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      view.place(axis, view.from + ((event.deltaX || event.deltaY) / inner) * (view.to - view.from));
      player.changed();
    }
  };
  useWheel(box, wheel);

  return (
    <section class="panel timeline" aria-label="Timeline">
      <div class="panel-head">
        <h2>Timeline</h2>
        <span class="keys" aria-hidden="true">
          {KEYS.map(([look, word]) => <span>{look.startsWith("mark") ? <b class={look}>{SIGNS[word]}</b> : <i class={look} />}{word}</span>)}
        </span>
        <span class="push" />
        <div class="group" role="group" aria-label="Scale">
          <button aria-pressed={axis.mode === "steps"} onClick={() => player.setMode("steps")}>steps</button>
          <button aria-pressed={axis.mode === "time"} onClick={() => player.setMode("time")}>time</button>
        </div>
        <div class="group" role="group" aria-label="Zoom">
          <button aria-label="Zoom out" title="Zoom out (−)" onClick={() => player.zoom(1.6)}>−</button>
          <button aria-label="Show all" title="Show all (0)" onClick={() => { view.fit(axis); player.changed(); }}>all</button>
          <button aria-label="Zoom in" title="Zoom in (+)" onClick={() => player.zoom(0.625)}>+</button>
        </div>
      </div>
      <div ref={box} class="chart">
        <canvas ref={chart} id="chart" role="slider" tabIndex={0} aria-label="Step" aria-valuemin={0} aria-valuemax={player.last}
          aria-valuenow={cursor} aria-valuetext={`Step ${whole(cursor)} of ${whole(player.last)}`} style={{ height: `${CHART_HEIGHT}px` }}
          onPointerMove={move} onPointerDown={down} onPointerUp={() => { drag.current = null; }} onPointerCancel={() => { drag.current = null; }}
          onPointerLeave={() => player.say(null)} />
        <div ref={scroller} class="lanes" tabIndex={0} aria-label="A lane for each request"
          onScroll={(event) => setScroll(event.currentTarget.scrollTop)}
          onClick={(event) => {
            const bounds = scroller.current!.getBoundingClientRect();
            const request = Math.floor((event.clientY - bounds.top + scroller.current!.scrollTop) / LANE);
            if (request < replay.lives.length) player.select(request);
          }}
          onPointerMove={(event) => {
            const bounds = scroller.current!.getBoundingClientRect();
            const life = replay.lives[Math.floor((event.clientY - bounds.top + scroller.current!.scrollTop) / LANE)];
            player.say(life ? { x: event.clientX, y: event.clientY, lines: laneHint(player, life.index) } : null);
          }}
          onPointerLeave={() => player.say(null)}>
          <div style={{ height: `${Math.max(LANE, replay.lives.length * LANE)}px` }}><canvas ref={lanes} class="sticky" aria-hidden="true" /></div>
        </div>
      </div>
    </section>
  );
}

const KEYS: [string, string][] = [
  ["swatch decode", "decode"], ["swatch prefill", "prefill"], ["mark", "arrives"], ["mark green", "ends"], ["mark orange", "eviction"], ["mark red", "preemption"],
  ["swatch wide p0", "decide"], ["swatch wide p1", "submit"], ["swatch wide p2", "wait"], ["swatch wide p3", "settle"],
];
const SIGNS: Record<string, string> = { arrives: "▼", ends: "●", eviction: "◆", preemption: "✕" };

function laneHint(player: Player, request: number): string[] {
  const life = player.replay.lives[request];
  const { before_step, end_step } = life.facts;
  const lines = [`Request ${nameOf(life)}: ${count(life.prompt, "prompt token")}, ${whole(life.drawn)} drawn`];
  lines.push(`came before step ${whole(before_step)}${life.admitted.length ? `, admitted in step ${whole(life.admitted[0])}` : ", never admitted"}`);
  if (life.preempted.length) lines.push(`preempted ${life.preempted.length === 1 ? "once" : `${life.preempted.length} times`}`);
  const when = end_step === null ? "before the first step" : `after step ${whole(end_step)}`;
  lines.push(life.facts.finish ? `ended ${when}: ${finish(life)}` : "still going at the end of the recording");
  return lines;
}

export function BlockMap({ player }: { player: Player }) {
  const [box, width, height] = useSize<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [scroll, setScroll] = useState(0), [hovered, setHovered] = useState(-1);
  const { replay, cursor, selected, theme } = player;
  const { num_blocks: blocks, enable_prefix_caching: caching } = replay.recording.engine;
  const grid = useMemo(() => layOut(blocks, Math.max(60, width - 4), Math.max(120, height - 8)), [blocks, width, height]);
  const state = replay.at(cursor);

  useLayoutEffect(() => {
    if (width) drawMap(canvas.current!, width, Math.min(height, grid.height + 8), scroll - 4, grid, replay, state, { selected, hovered, step: cursor }, theme);
  });

  useEffect(() => { // while steps go by under a pointer that rests
    if (hovered >= 0 && player.hint) player.say({ ...player.hint, lines: describeBlock(replay, replay.at(player.cursor), hovered, player.cursor) });
  }, [cursor]);

  let held = 0, shared = 0, cached = 0;
  for (let block = 0; block < blocks; block++) {
    if (state.readers[block] > 0) held++;
    if (state.readers[block] > 1) shared++;
    if (state.released[block]) cached++;
  }
  const at = (event: MouseEvent) => {
    const bounds = box.current!.getBoundingClientRect();
    return blockAt(grid, blocks, event.clientX - bounds.left, event.clientY - bounds.top + box.current!.scrollTop - 4);
  };
  const hint = (event: PointerEvent) => {
    const block = at(event);
    setHovered(block);
    player.say(block < 0 ? null : { x: event.clientX, y: event.clientY, lines: describeBlock(replay, state, block, cursor) });
  };
  const share = (number: number) => `${(100 * number) / (blocks || 1)}%`;
  return (
    <section class="panel map" aria-label="Block map">
      <div class="panel-head">
        <h2>Blocks</h2>
        <span class="quiet">{whole(blocks)} × {whole(replay.recording.engine.block_size)} tokens{caching === false ? ", no prefix cache" : ""}</span>
      </div>
      <div class="pool" role="img" aria-label={`${held} blocks held, ${cached} cached, ${blocks - held - cached} blank`}>
        <span class="bar"><i class="held" style={{ width: share(held) }} /><i class="cached" style={{ width: share(cached) }} /></span>
        <span><b>{whole(held)}</b> held{shared ? <span class="quiet"> ({whole(shared)} shared)</span> : null}</span>
        <span><b>{whole(cached)}</b> cached</span>
        <span><b>{whole(blocks - held - cached)}</b> blank</span>
      </div>
      <div ref={box} class="cells" tabIndex={0} aria-label="One cell for each block; the numbers above say how many are held, cached and blank"
        onScroll={(event) => setScroll(event.currentTarget.scrollTop)} onPointerMove={hint} onPointerDown={hint}
        onPointerLeave={(event) => { if (event.pointerType === "touch") return; setHovered(-1); player.say(null); }}
        onClick={(event) => {
          const readers = readersOf(state).get(at(event)) ?? [];
          if (readers.length) player.select(readers[(readers.indexOf(player.selected) + 1) % readers.length]);
        }}>
        <div style={{ height: `${grid.height + 8}px` }}><canvas ref={canvas} id="map" class="sticky" /></div>
      </div>
      <ul class="legend" aria-label="What cells mean">
        <li><i class="cellkey one" />held</li>
        <li><i class="cellkey part" />partly filled</li>
        <li><i class="cellkey two" />shared</li>
        <li><i class="cellkey old" />cached, stronger: used more recently</li>
        <li><i class="cellkey blank" />blank</li>
        <li><i class="cellkey taken" />taken now</li>
        <li><i class="cellkey evicted" />evicted now</li>
        <li><i class="cellkey given" />given back now</li>
      </ul>
    </section>
  );
}

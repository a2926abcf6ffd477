/** The panels of text: what happened, who waits and runs, and one request in full. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { colourOf, inkOn } from "./colours";
import type { Player } from "./player";
import { SPAN, type Life } from "./replay";
import { count, finish, nameOf, percent, quote, spell, tell, time, visible, whole, whyWaiting, type Kind } from "./words";

const SIGNS: Record<Kind, string> = {
  arrive: "▼", preempt: "✕", admit: "→", prefill: "▮", decode: "›", evict: "◆", blocks: "▦", wait: "…", end: "●", fail: "!",
};

export function Chip({ player, request, children }: { player: Player; request: number; children?: string }) {
  const life = player.replay.lives[request];
  const { theme } = player;
  return (
    <button class="chip" aria-pressed={player.selected === request} onClick={() => player.select(request)}
      style={{ background: colourOf(request, theme), color: inkOn(request, theme) }} aria-label={`Request ${nameOf(life)}`}>
      {children ?? nameOf(life)}
    </button>
  );
}

export function Story({ player }: { player: Player }) {
  const { replay, cursor } = player;
  const step = replay.recording.steps[cursor];
  const lines = useMemo(() => tell(replay, cursor), [replay, cursor, replay.length]);
  return (
    <section class="panel story" aria-label="What happened in this step">
      <div class="panel-head">
        <h2>{step?.after ? "After the last step" : `Step ${whole(cursor)}`}</h2>
        {step && !step.after ? <span class="quiet">{time(step.t[5] - step.t[0])} long, at {time(step.t[0])}</span> : null}
      </div>
      {step ? (
        <ol class="lines">
          {lines.map((line) => (
            <li class={line.kind}>
              <span class="sign" aria-hidden="true">{SIGNS[line.kind]}</span>
              <span>
                {line.text}
                {line.kind === "decode" && line.requests.length > 1 ? <Drawn player={player} requests={line.requests} /> : null}
              </span>
            </li>
          ))}
        </ol>
      ) : <p class="nothing">No step was recorded.</p>}
      <Queue player={player} />
    </section>
  );
}

/** What each request drew in the step. */
function Drawn({ player, requests }: { player: Player; requests: number[] }) {
  const { steps, texts } = player.replay.recording;
  const spans = new Map(steps[player.cursor].spans.map((span) => [span[0], span[3]]));
  return (
    <span class="drawn">
      {requests.slice(0, 24).map((request) => {
        const token = spans.get(request) ?? -1;
        return (
          <span class="pair">
            <Chip player={player} request={request} />
            <code>{token >= 0 ? visible(texts[token] ?? `[${token}]`) : "dropped"}</code>
          </span>
        );
      })}
      {requests.length > 24 ? <span class="quiet">and {requests.length - 24} more</span> : null}
    </span>
  );
}

function Queue({ player }: { player: Player }) {
  const { replay, cursor } = player;
  const step = replay.recording.steps[cursor];
  const [waiting, running] = [replay.waiting(cursor), replay.running(cursor)];
  const head = waiting[0];
  const most = 32;
  return (
    <div class="queues">
      <h3>Running <b>{whole(running.length)}</b>{replay.recording.engine.max_num_seqs ? <span class="quiet"> of at most {whole(replay.recording.engine.max_num_seqs)}</span> : null}</h3>
      <p class="chips" aria-label="Running">
        {running.slice(0, most).map((life) => {
          const ending = endingOf(life, cursor);
          return <span key={life.index} class={ending ? "ending" : ""} title={ending || undefined}><Chip player={player} request={life.index} /></span>;
        })}
        {running.length > most ? <span class="quiet">and {running.length - most} more</span> : null}
        {!running.length ? <span class="quiet">nobody</span> : null}
      </p>
      <h3>Waiting <b>{whole(waiting.length)}</b></h3>
      <p class="chips" aria-label="Waiting">
        {waiting.slice(0, most).map((life, i) => (
          <span key={life.index} class={i === 0 ? "head" : ""}>
            <Chip player={player} request={life.index}>{`${nameOf(life)}${life.preempted.some((at) => at <= cursor) ? " ✕" : ""}`}</Chip>
          </span>
        ))}
        {waiting.length > most ? <span class="quiet">and {waiting.length - most} more</span> : null}
        {!waiting.length ? <span class="quiet">nobody</span> : null}
      </p>
      {head && step?.wait ? <p class="why">Why request {nameOf(head)} is not admitted: {whyWaiting(step.wait, replay, cursor)}.</p> : null}
    </div>
  );
}

export function RequestPanel({ player }: { player: Player }) {
  const { replay, cursor, selected } = player;
  const life = replay.lives[selected];
  if (!life)
    return (
      <section class="panel request" aria-label="Request">
        <div class="panel-head"><h2>Request</h2></div>
        <div class="nothing">
          <p>Choose a request: its lane, one of its blocks, or its number.</p>
          <p class="chips">{replay.lives.slice(0, 40).map((each) => <Chip key={each.index} player={player} request={each.index} />)}</p>
        </div>
      </section>
    );
  const table = replay.at(cursor).tables.get(selected) ?? [];
  return (
    <section class="panel request" aria-label={`Request ${nameOf(life)}`}>
      <div class="panel-head">
        <i class="dot" style={{ background: colourOf(selected, player.theme) }} />
        <h2>Request {nameOf(life)}</h2>
        <span class="quiet">{doing(player, life)}</span>
        <span class="push" />
        <button class="plain" aria-label="Close" title="Close (Escape)" onClick={() => player.select(selected)}>✕</button>
      </div>
      <div class="scroll" tabIndex={0} aria-label="Text, blocks and facts">
        <Text key={selected} player={player} life={life} />
        <h3>Block table <b>{whole(table.length)}</b></h3>
        <p class="table">{table.length ? table.slice(0, 400).map((block, i) => <span title={`place ${i}`}>{block}</span>) : <span class="quiet">it holds no block</span>}</p>
        <Facts player={player} life={life} />
      </div>
    </section>
  );
}

function doing(player: Player, life: Life): string {
  const { replay, cursor } = player;
  if (life.facts.before_step > cursor) return "has not come yet";
  if (replay.hasEnded(life, cursor)) return `ended: ${life.facts.finish}`;
  if (replay.isRunning(life, cursor)) return endingOf(life, cursor) || "runs";
  return life.preempted.some((at) => at <= cursor) ? "preempted, waits" : "waits";
}

/** What to say of one that runs for the last time, or holds its blocks for no more than a step still. */
function endingOf(life: Life, step: number): string {
  const { end_step } = life.facts;
  return end_step === null || end_step > step ? "" : end_step === step ? "ends with this step" : "has ended, and gives its blocks back next";
}

/** Prompts longer than this are shown from both ends. */
const LONGEST = 1200;

/** A request's text up to the cursor: runs of the prompt, then each token drawn. */
function Text({ player, life }: { player: Player; life: Life }) {
  const { replay, cursor } = player;
  const { texts } = replay.recording;
  const [whole_, setWhole] = useState(false);
  const newest = useRef<HTMLSpanElement>(null);
  const at = life.spansUntil(cursor) - 1;
  const span = at >= 0 && life.spans[at * SPAN] === cursor ? life.spans.slice(at * SPAN, at * SPAN + SPAN) : null;
  const computed = replay.computed(life, cursor), admitted = life.admitted.length && life.admitted[0] <= cursor;
  const [from, to] = span && span[1] < life.prompt ? [span[1], Math.min(span[2], life.prompt)] : [0, 0];
  const cached = admitted ? Math.min(life.facts.cached, life.prompt) : 0;
  const cuts = [...new Set([0, cached, from, to, Math.min(computed, life.prompt), life.prompt])].sort((a, b) => a - b);
  const prompt = useMemo(() => spell(life.facts.prompt, texts), [life, texts]);
  const words = (start: number, stop: number) => prompt.slice(start, stop).join("");
  const show = (start: number, stop: number) => {
    if (whole_ || stop - start <= LONGEST) return words(start, stop);
    return <>{words(start, start + LONGEST / 3)} <button class="more" onClick={() => setWhole(true)}>{whole(stop - start - (2 * LONGEST) / 3)} more tokens</button> {words(stop - LONGEST / 3, stop)}</>;
  };
  const drawn = replay.drawn(life, cursor), pieces = spell(drawn.map(([, token]) => token), texts);
  useEffect(() => { // the newest token stays in sight, and the page where it is
    const token = newest.current, box = token?.closest(".scroll");
    if (!token || !box || drawn.at(-1)?.[2] !== cursor) return;
    const below = token.getBoundingClientRect().bottom + 34 - box.getBoundingClientRect().bottom;
    const above = box.getBoundingClientRect().top - token.getBoundingClientRect().top;
    box.scrollTop += below > 0 ? below : above > 0 ? -above : 0;
  }, [cursor]);
  return (
    <>
      <p class="text" aria-label="Text" dir="auto">
        <bdi>{cuts.slice(1).map((stop, i) => {
          const start = cuts[i];
          const kind = start >= from && stop <= to && to > from ? "now" : stop <= cached ? "cached" : stop <= computed ? "done" : "todo";
          return <span key={`${start}`} class={`prompt ${kind}`}>{show(start, stop)}</span>;
        })}</bdi>
        <bdi>{drawn.map(([place, token, step], i) => {
          const say = (event: PointerEvent) => player.say({ x: event.clientX, y: event.clientY, lines: alternatives(player, life, token, step) });
          return (
          <span key={place} ref={place === drawn.at(-1)![0] ? newest : undefined} class={`token${step === cursor ? " new" : ""}`} data-step={step} data-place={place} data-token={token}
            onPointerEnter={say} onPointerDown={say} onPointerLeave={(event) => { if (event.pointerType !== "touch") player.say(null); }} onClick={() => player.go(step)}>{pieces[i]}</span>
          );
        })}</bdi>
      </p>
      <p class="text-key" aria-hidden="true"><span class="prompt cached">from the cache</span> <span class="prompt done">computed</span> <span class="prompt now">in this step</span> <span class="prompt todo">to come</span> <span class="token new">drawn now</span></p>
    </>
  );
}

function alternatives(player: Player, life: Life, token: number, step: number): string[] {
  const { texts, steps } = player.replay.recording;
  const lines = [`${quote(texts[token], token)}, token ${token}, drawn in step ${whole(step)}`];
  for (const [id, logprob] of (steps[step].top?.[life.index] ?? []).slice(0, 10))
    lines.push(`${id === token ? "▸" : " "} ${percent(Math.exp(logprob)).padStart(6)}  ${quote(texts[id], id)}`);
  return lines;
}

function Facts({ player, life }: { player: Player; life: Life }) {
  const { replay } = player;
  const { facts, spans } = life;
  const { steps } = replay.recording;
  const drawn = replay.drawn(life, player.last), preempted = life.preempted.length;
  const rows: [string, string][] = [];
  const first = spans.length ? steps[spans[0]].t[1] : null;
  rows.push(["came", `at ${time(facts.arrived)}, before step ${whole(facts.before_step)}`]);
  if (first !== null) rows.push(["waited", `${time(Math.max(0, first - facts.arrived))}${preempted ? ", until it was first admitted" : ""}`]);
  rows.push(["prompt", `${count(life.prompt, "token")}, ${whole(facts.cached)} found in the cache`]);
  if (drawn.length) {
    const [start, stop] = [steps[drawn[0][2]].t[4], steps[drawn.at(-1)![2]].t[4]];
    rows.push(["first token", `after ${time(start - facts.arrived)}`]);
    if (drawn.length > 1 && stop > start) rows.push(["then", `${((drawn.length - 1) / ((stop - start) / 1e6)).toFixed(1)} tokens a second`]);
  }
  rows.push(["drawn", `${whole(drawn.length)} of at most ${count(facts.max_tokens, "token")}`]);
  if (preempted) rows.push(["preempted", preempted === 1 ? "once" : `${preempted} times`]);
  rows.push(["end", facts.ended === null ? "it had not ended when the recording did" : `at ${time(facts.ended)}: ${finish(life)}`]);
  if (facts.priority) rows.push(["priority", String(facts.priority)]);
  const params = Object.entries(facts.params ?? {});
  if (params.length) rows.push(["parameters", params.map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")]);
  return <dl class="facts">{rows.map(([key, value]) => <><dt>{key}</dt><dd>{value}</dd></>)}</dl>;
}

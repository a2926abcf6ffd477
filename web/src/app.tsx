/** The whole page: header, transport, panels, help, and the keyboard. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { BlockMap, Timeline } from "./charts";
import { RequestPanel, Story } from "./panels";
import { JUMPS, SPEEDS, type Jump, type Player, type Speed } from "./player";
import { count, doingNow, nameOf, percent, time, whole } from "./words";

export function App({ player }: { player: Player }) {
  const [, draw] = useState(0);
  useEffect(() => player.watch(() => draw((number) => number + 1)), [player]);
  useEffect(() => {
    document.documentElement.dataset.theme = player.dark ? "dark" : "light";
  }, [player.dark]);
  const { cursor, selected, playing, live } = player, { model } = player.replay.recording.engine;
  useEffect(() => { document.title = `${model ?? "recording"} · nanovllm`; }, [model]);
  useEffect(() => { // an address that can be passed on; browsers bear only so many changes of it
    if (playing || live) return;
    const timer = setTimeout(() => history.replaceState(null, "", `#step=${cursor}${selected >= 0 ? `&request=${selected}` : ""}`), 200);
    return () => clearTimeout(timer);
  }, [cursor, selected, playing, live]);
  useEffect(() => {
    const listen = (event: KeyboardEvent) => press(player, event);
    const touch = (event: PointerEvent) => { if (event.pointerType === "touch") player.say(null); }; // the last one's
    window.addEventListener("keydown", listen);
    window.addEventListener("pointerdown", touch, true);
    window.addEventListener("pointercancel", touch, true);
    return () => {
      window.removeEventListener("keydown", listen);
      window.removeEventListener("pointerdown", touch, true);
      window.removeEventListener("pointercancel", touch, true);
    };
  }, [player]);
  return (
    <>
      <a class="skip" href="#story">Skip to what happens in the step</a>
      <Header player={player} />
      <Transport player={player} />
      <Notices player={player} />
      <main>
        <Timeline player={player} />
        <div id="story" class="columns">
          <Story player={player} />
          <BlockMap player={player} />
          <RequestPanel player={player} />
        </div>
      </main>
      <div class="hidden" aria-live="polite">{player.playing ? "" : `Step ${player.cursor}`}</div>
      <Hint player={player} />
      {player.help ? <Help player={player} /> : null}
    </>
  );
}

function recordedSteps(player: Player): number {
  const { steps } = player.replay.recording;
  return steps.length - (steps.at(-1)?.after ? 1 : 0);
}

function Header({ player }: { player: Player }) {
  const { engine, dropped_steps } = player.replay.recording;
  const totals = useMemo(() => player.totals(), [player.replay, player.replay.length]);
  const facts: [string, string][] = [
    ["requests", whole(totals.requests)], ["steps", whole(recordedSteps(player))], ["tokens drawn", whole(totals.tokens)], ["tokens/s", whole(totals.perSecond)],
    ["cache hits", percent(totals.hitRate)], ["preemptions", whole(totals.preemptions)], ["evictions", whole(totals.evictions)],
  ];
  if (dropped_steps) facts.push(["steps missing", whole(dropped_steps)]);
  return (
    <header>
      <div class="brand">
        <h1><span>nanovllm</span> {engine.model ?? "recording"}</h1>
        <p class="quiet">
          {[engine.device_name || engine.device, engine.dtype, `${whole(engine.num_blocks)} blocks of ${count(engine.block_size, "token")}`,
            totals.seconds ? `${time(totals.seconds * 1e6)} recorded` : ""].filter(Boolean).join(" · ")}
        </p>
      </div>
      <dl class="totals">{facts.map(([key, value]) => <div><dt>{key}</dt><dd>{value}</dd></div>)}</dl>
    </header>
  );
}

const JUMP_KEYS: Partial<Record<Jump, string>> = { preempted: "P", evicted: "E", hits: "H", finished: "F" };

function Transport({ player }: { player: Player }) {
  const [kind, setKind] = useState<Jump>("evicted");
  const speeds: Speed[] = [...SPEEDS, "real"], key = JUMP_KEYS[kind];
  return (
    <nav class="transport" aria-label="Playing">
      <div class="group" role="group" aria-label="Steps">
        <button aria-label="First step" title="First step (Home)" onClick={() => player.step(-Infinity)}><Icon path="M2 2h2v10H2zM12 2v10L5 7z" /></button>
        <button aria-label="Step back" title="Step back (←)" onClick={() => player.step(-1)}><Icon path="M10 2v10L4 7z" /></button>
        <button class="play" id="play" aria-label={player.playing ? "Pause" : "Play"} title="Play or pause (space)" onClick={() => player.toggle()}><Icon path={player.playing ? "M3 2h3v10H3zM8 2h3v10H8z" : "M3 1v12l9-6z"} /></button>
        <button aria-label="Step forward" title="Step forward (→)" onClick={() => player.step(1)}><Icon path="M4 2v10l6-5z" /></button>
        <button aria-label="Last step" title="Last step (End)" onClick={() => player.step(Infinity)}><Icon path="M10 2h2v10h-2zM2 2v10l7-5z" /></button>
      </div>
      <label class="number">step <input type="number" id="step" min={0} max={player.last} value={player.cursor} aria-label="Step"
        onChange={(event) => {
          const field = event.currentTarget;
          player.pause();
          if (field.value) player.go(Number(field.value));
          field.value = String(player.cursor); // what it says is where we are, whatever was written
        }} /> <span class="quiet">of {whole(player.last)}</span></label>
      <label class="select"><span class="hidden">Speed</span>
        <select id="speed" value={String(player.speed)} onChange={(event) => {
          const value = event.currentTarget.value;
          player.speed = value === "real" ? "real" : (Number(value) as Speed);
          player.changed();
        }}>{speeds.map((speed) => <option value={String(speed)}>{speed === "real" ? "real time" : `${speed} steps/s`}</option>)}</select>
      </label>
      <div class="group jump" role="group" aria-label="Jump">
        <button aria-label={`Previous ${JUMPS[kind]}`} title={`Previous ${JUMPS[kind]}${key ? ` (⇧${key})` : ""}`} onClick={() => player.jump(kind, -1)}>‹</button>
        <select id="jump" aria-label="Jump to" value={kind} onChange={(event) => setKind(event.currentTarget.value as Jump)}>
          {Object.entries(JUMPS).map(([value, text]) => <option value={value}>{text}</option>)}
        </select>
        <button id="next" aria-label={`Next ${JUMPS[kind]}`} title={`Next ${JUMPS[kind]}${key ? ` (${key})` : ""}`} onClick={() => player.jump(kind)}>›</button>
      </div>
      {player.live && !player.closed ? (
        <button id="follow" class={`follow${player.connected ? "" : " lost"}`} aria-pressed={player.follow} onClick={() => {
          player.follow = !player.follow;
          if (player.follow) { player.pause(); player.go(player.last, { keep: true }); }
          player.changed();
        }}>{player.connected ? (player.follow ? "● live" : "○ follow") : "connection lost"}</button>
      ) : null}
      <span class="push" />
      <Search player={player} />
      <button class="icon" id="theme" aria-label={player.dark ? "Light colours" : "Dark colours"} title="Light or dark (d)" onClick={() => { player.dark = !player.dark; player.changed(); }}>{player.dark ? "☀︎" : "☾"}</button>
      <button class="icon" id="help" aria-label="How to read this" title="How to read this (?)" onClick={() => { player.help = true; player.changed(); }}>?</button>
    </nav>
  );
}

function Icon({ path }: { path: string }) {
  return <svg class="sign-icon" viewBox="0 0 14 14" aria-hidden="true"><path d={path} /></svg>;
}

function Search({ player }: { player: Player }) {
  const [said, setSaid] = useState("");
  const last = useRef<[string, number]>(["", 0]);
  const find = (words: string) => {
    const found = player.search(words);
    if (!words.trim()) return setSaid("");
    if (!found.length) return setSaid("nothing found");
    const at = last.current[0] === words ? (last.current[1] + 1) % found.length : 0;
    last.current = [words, at];
    const life = found[at];
    setSaid(found.length > 1 ? `${at + 1} of ${found.length}: request ${nameOf(life)}` : `request ${nameOf(life)}`);
    player.selected = life.index;
    player.pause();
    if (life.facts.before_step > player.cursor || player.replay.hasEnded(life, player.cursor)) player.go(life.admitted[0] ?? life.facts.before_step);
    player.changed();
  };
  return (
    <form class="search" role="search" onSubmit={(event) => {
      event.preventDefault();
      find((event.currentTarget.elements.namedItem("words") as HTMLInputElement).value);
    }}>
      <input id="search" name="words" type="search" placeholder="Find a request or a text  /" aria-label="Find a request by its name or its text" autocomplete="off"
        onInput={(event) => { if (!event.currentTarget.value) setSaid(""); }} />
      {said ? <output>{said}</output> : null}
    </form>
  );
}

function Notices({ player }: { player: Player }) {
  const { engine, dropped_steps, steps, requests } = player.replay.recording;
  const notices: string[] = [], now = player.live && player.connected && !player.closed && player.nows.length > 0;
  if (dropped_steps && !now) notices.push(`${count(dropped_steps, "step is", "steps are")} missing: the recorder's limit was reached. What is shown is exact for the steps that are here.`);
  if (!steps.length && !player.live) notices.push(requests.length ? "No step was recorded: the requests were never computed." : "This recording is empty: no request came while it ran.");
  if (player.closed) notices.push("The engine is closed: this is all that it did.");
  else if (player.live && !player.connected) notices.push("The connection to the engine is lost; what came before is still here. It is tried again by itself.");
  if (player.live && player.connected && !player.closed && !steps.length) notices.push("Waiting for the engine's first step.");
  if (player.notice) notices.push(player.notice);
  useEffect(() => {
    if (!player.notice) return;
    const timer = setTimeout(() => { player.notice = ""; player.changed(); }, 2500);
    return () => clearTimeout(timer);
  }, [player.notice]);
  return (
    <div class="notices">
      {now && dropped_steps ? ( // not a status: nobody wants to hear it read ten times a second
        <p class="doing">The recording is full: {count(dropped_steps, "step is", "steps are")} not in it. Now: {doingNow(player.nows, engine.num_blocks)}</p>
      ) : null}
      <div role="status">{notices.map((text) => <p key={text}>{text}</p>)}</div>
    </div>
  );
}

function Hint({ player }: { player: Player }) {
  const { hint } = player;
  if (!hint) return null;
  const right = hint.x > window.innerWidth - 340, below = hint.y > window.innerHeight - 190;
  const style = {
    left: right ? "auto" : `${hint.x + 14}px`, right: right ? `${Math.max(8, window.innerWidth - hint.x + 14)}px` : "auto",
    top: below ? "auto" : `${hint.y + 14}px`, bottom: below ? `${window.innerHeight - hint.y + 14}px` : "auto",
  };
  if (window.innerWidth < 500) Object.assign(style, { left: "8px", right: "8px" });
  return <div class="hint" role="tooltip" style={style}>{hint.lines.map((line, i) => (i ? <p>{line}</p> : <p><b>{line}</b></p>))}</div>;
}

const KEYS: [string, string][] = [
  ["space", "play, pause"], ["← →", "a step back, forward"], ["⇧← ⇧→", "ten steps"], ["Home End", "first, last step"], ["P", "next preemption"], ["E", "next eviction"],
  ["H", "next cache hit"], ["F", "next end of a request"], ["⇧ with these", "the one before"], ["[ ]", "request before, after"], ["+ − 0", "zoom in, out, all"], ["/", "find"], ["D", "light, dark"], ["Esc", "close, deselect"], ["?", "this"],
];

function Help({ player }: { player: Player }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => { dialog.current?.showModal(); }, []);
  const close = () => dialog.current?.close(); // which gives the focus back
  return (
    <dialog ref={dialog} class="help" aria-label="How to read this" onClose={() => { player.help = false; player.changed(); }} onClick={(event) => { if (event.target === dialog.current) close(); }}>
      <div class="panel-head"><h2>How to read this</h2><span class="push" /><button class="plain" aria-label="Close" onClick={close}>✕</button></div>
      <div class="two">
        <div>
          <p>An inference engine answers many <b>requests</b> at once. It works in <b>steps</b>: it <i>decides</i> which tokens to compute next, <i>submits</i> them to the device, <i>waits</i>, and <i>settles</i> what was drawn. This page replays every decision of a run as it was recorded. (On a CPU a step is computed while it is submitted.)</p>
          <p><b>Prefill</b> reads a prompt, many tokens in one step; a long prompt comes in chunks, so that others need not wait for it. <b>Decode</b> draws one token in each step, for all running requests together.</p>
          <p>What the model remembers of a request lies in <b>blocks</b> of a few tokens. A block is <i>held</i> while a request reads it, in that request's colour, and fills from the bottom. Two requests with the same beginning <i>share</i> its blocks: the cell is split between them. When the last reader lets go, a full block stays <i>cached</i> (grey, with a folded corner), so that a later prompt may find it. When no blank block is left, the cached one that has not been used for longest is <i>evicted</i>: the faintest, with a dashed edge.</p>
          <p>If the running requests need more blocks than there are, the last of them is <b>preempted</b> (hatched in its lane): it gives its blocks back, waits, and is computed again.</p>
          <p>Where to look: drag along the timeline, the strip above it moves the part that is seen; with ctrl the wheel zooms; hover over anything, or touch it; click a lane, a block or a number to follow one request. Numbers in blocks are requests, ×2 means two readers.</p>
        </div>
        <table><caption>Keys</caption><tbody>{KEYS.map(([key, text]) => <tr><th scope="row"><kbd>{key}</kbd></th><td>{text}</td></tr>)}</tbody></table>
      </div>
    </dialog>
  );
}

function press(player: Player, event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (player.help) return document.querySelector("dialog")?.close();
    if (target instanceof HTMLInputElement) target.blur();
    else player.selected = -1;
    player.hint = null;
    return player.changed();
  }
  if (player.help || target instanceof HTMLInputElement || target instanceof HTMLSelectElement) return;
  if (event.key === " " && target instanceof HTMLButtonElement) return;
  const by = event.shiftKey ? -1 : 1;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const acts: Record<string, () => void> = {
    " ": () => player.toggle(), ArrowLeft: () => player.step(event.shiftKey ? -10 : -1), ArrowRight: () => player.step(event.shiftKey ? 10 : 1),
    Home: () => player.step(-Infinity), End: () => player.step(Infinity),
    "/": () => document.getElementById("search")?.focus(), "?": () => { player.help = true; player.changed(); },
    d: () => { player.dark = !player.dark; player.changed(); },
    "+": () => player.zoom(0.625), "=": () => player.zoom(0.625), "-": () => player.zoom(1.6), "0": () => { player.view.fit(player.axis); player.changed(); },
    "[": () => neighbour(player, -1), "]": () => neighbour(player, 1),
  };
  const jump = (Object.keys(JUMP_KEYS) as Jump[]).find((kind) => JUMP_KEYS[kind] === key.toUpperCase());
  if (jump) player.jump(jump, by);
  else if (key in acts) acts[key]();
  else return;
  event.preventDefault();
}

function neighbour(player: Player, by: number): void {
  const { lives } = player.replay;
  if (!lives.length) return;
  player.selected = Math.max(0, Math.min(lives.length - 1, player.selected + by));
  player.changed();
}

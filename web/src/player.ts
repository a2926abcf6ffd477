/** What the reader looks at: the step, the request, the part of the timeline; and playing on. */

import { theme, type Theme } from "./colours";
import { PREFILL, type Life, type Replay } from "./replay";
import { Axis, View, type Mode } from "./timeline";
import { nameOf, spell } from "./words";

export const SPEEDS = [1, 2, 5, 10, 30, 100] as const;
export type Speed = (typeof SPEEDS)[number] | "real";
export type Jump = "preempted" | "evicted" | "hits" | "finished" | "arrivals";

export interface Hint { x: number; y: number; lines: string[]; }

/** What an engine does whose recording is full; see live.ts. */
export interface Now {
  seconds: number; running: number; waiting: number; held: number; cached: number; prompt_tokens: number; drawn_tokens: number;
}
/** Seconds that a rate is taken from. */
const WINDOW = 1.5;

export class Player {
  cursor = 0;
  selected = -1;
  playing = false;
  speed: Speed = 10;
  dark: boolean;
  help = false;
  axis: Axis;
  view = new View();
  hint: Hint | null = null;
  /** Whether the newest step is shown as it comes; live only. */
  follow = false;
  live = false;
  connected = true;
  /** Whether the engine that is watched has been closed. */
  closed = false;
  /** What the engine has said of itself lately, since the recording is full. */
  nows: Now[] = [];
  notice = "";
  private watchers = new Set<() => void>();
  private since = 0; // when the last step was shown
  private owed = 0; // part of a step, or microseconds, that have passed since
  private queued = false;

  constructor(public replay: Replay, dark: boolean) {
    this.dark = dark;
    this.axis = new Axis(replay, "steps");
    this.view.fit(this.axis);
  }

  get theme(): Theme { return theme(this.dark); }
  get last(): number { return Math.max(0, this.replay.length - 1); }

  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }

  /** Something changed: draw once, before the next frame. */
  changed(): void {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      for (const watcher of this.watchers) watcher();
    });
  }

  go(step: number, { keep = false } = {}): void {
    const before = this.cursor;
    this.cursor = Math.max(0, Math.min(this.last, Math.round(step)));
    if (!keep && this.live && this.cursor < this.last) this.follow = false;
    if (this.cursor !== before) this.view.show(this.axis, this.cursor);
    this.changed();
  }

  step(by: number): void {
    this.pause();
    this.go(this.cursor + by);
  }

  play(): void {
    if (!this.replay.length || this.playing) return;
    if (this.cursor >= this.last) this.go(0);
    this.playing = true;
    this.since = performance.now();
    this.owed = 0;
    this.changed();
    requestAnimationFrame((now) => this.tick(now));
  }

  pause(): void {
    this.playing = false;
    this.changed();
  }

  toggle(): void { this.playing ? this.pause() : this.play(); }

  private tick(now: number): void {
    if (!this.playing) return;
    const passed = Math.max(0, now - this.since);
    this.since = now;
    let to = this.cursor;
    if (this.speed === "real") {
      this.owed += passed * 1000;
      const { steps } = this.replay.recording;
      while (to < this.last && steps[to + 1].t[0] - steps[to].t[0] <= this.owed) {
        this.owed -= Math.max(0, steps[to + 1].t[0] - steps[to].t[0]);
        to++;
      }
    } else {
      this.owed += (passed / 1000) * this.speed;
      to = Math.min(this.last, to + Math.floor(this.owed));
      this.owed %= 1;
    }
    if (to !== this.cursor) this.go(to);
    if (to >= this.last) this.pause();
    else requestAnimationFrame((next) => this.tick(next));
  }

  /** Go to the next step, or the one before, in which something of a kind happened. */
  jump(kind: Jump, by: 1 | -1 = 1): boolean {
    this.pause();
    const numbers = this.replay.counts[kind];
    for (let step = this.cursor + by; step >= 0 && step <= this.last; step += by)
      if (numbers[step]) {
        this.go(step);
        return true;
      }
    this.notice = `No ${by > 0 ? "later" : "earlier"} ${JUMPS[kind]}.`;
    this.changed();
    return false;
  }

  select(request: number): void {
    this.selected = this.selected === request || !this.replay.lives[request] ? -1 : request;
    this.changed();
  }

  setMode(mode: Mode): void {
    this.axis = new Axis(this.replay, mode);
    this.view.fit(this.axis);
    this.changed();
  }

  zoom(factor: number, about?: number): void {
    this.view.zoom(this.axis, factor, about ?? (this.axis.start(this.cursor) + this.axis.stop(this.cursor)) / 2);
    this.changed();
  }

  /** Requests whose name is the words, or whose texts hold them. */
  search(words: string): Life[] {
    const wanted = words.trim().toLowerCase();
    if (!wanted) return [];
    const { texts } = this.replay.recording;
    const named = this.replay.lives.filter((life) => nameOf(life).toLowerCase() === wanted || life.facts.id.toLowerCase() === wanted);
    if (named.length) return named;
    return this.replay.lives.filter((life) =>
      `${spell(life.facts.prompt, texts).join("")}\n${life.facts.text}`.toLowerCase().includes(wanted));
  }

  hear(now: Now): void {
    this.nows = [...this.nows.filter((each) => now.seconds - each.seconds <= WINDOW), now];
  }

  say(hint: Hint | null): void {
    if (!hint && !this.hint) return;
    this.hint = hint;
    this.changed();
  }

  /** Totals up to the end of the recording. */
  totals(): { requests: number; tokens: number; perSecond: number; hitRate: number; preemptions: number; evictions: number; seconds: number } {
    const { lives, recording, counts } = this.replay;
    let tokens = 0, prompts = 0, found = 0, preemptions = 0, evictions = 0;
    for (const life of lives) {
      tokens += life.drawn;
      if (life.spans.length && life.spans[4] === PREFILL) {
        prompts += life.prompt;
        found += Math.min(life.facts.cached, life.prompt);
      }
      preemptions += life.preempted.length;
    }
    for (let n = 0; n < recording.steps.length; n++) evictions += counts.evicted[n];
    const { steps } = recording;
    const seconds = steps.length ? (steps[steps.length - 1].t[5] - steps[0].t[0]) / 1e6 : 0;
    return { requests: lives.length, tokens, perSecond: seconds ? tokens / seconds : 0, hitRate: prompts ? found / prompts : 0, preemptions, evictions, seconds };
  }
}

export const JUMPS: Record<Jump, string> = {
  preempted: "preemption", evicted: "eviction", hits: "cache hit", finished: "end of a request", arrivals: "arrival",
};

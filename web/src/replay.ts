/**
 * What the engine's books said at each step, from what happened to blocks and requests.
 *
 *     events of   step 0 .. 63 | 64 .. 127 | 128 ..
 *     keyframe    0            1           2           the state before the first of them
 *
 * ``at(step)`` copies the keyframe before a step and replays the few steps up to it, or goes on from where it is. So any
 * of thousands of steps is reached in a few milliseconds, and nothing is kept for each step but what it did.
 */

import { EVICT, FORGET, FREE, HOLD, KNOW, TAKE, type Recording, type RequestFacts, type Step } from "./format";

const EVERY = 64;
const MOST_KEYFRAME_BYTES = 64e6;

/** What a span computes: a prompt, once more what a preempted request had, or the next token. */
export const PREFILL = 0, RECOMPUTE = 1, DECODE = 2;

/** What a request does in a stretch of steps. */
export const WAITING = 0, RUNNING_PREFILL = 1, RUNNING_DECODE = 2, PREEMPTED = 3, IDLE = 4;

/** The books after a step's decision. Arrays have one entry a block; nobody but Replay writes them. */
export class State {
  step = -1;
  readers: Int32Array;
  findable: Uint8Array;
  /** When a block was let go of by its last reader, counted in such events; 0: not in the list of cached blocks. */
  released: Int32Array;
  clock = 0;
  /** Who wrote what a block holds, -1: nobody known, and at which place of its block table. */
  writer: Int32Array;
  place: Int32Array;
  pins: Int32Array;
  tables = new Map<number, number[]>();

  constructor(blocks: number) {
    this.readers = new Int32Array(blocks);
    this.findable = new Uint8Array(blocks);
    this.released = new Int32Array(blocks);
    this.writer = new Int32Array(blocks).fill(-1);
    this.place = new Int32Array(blocks);
    this.pins = new Int32Array(blocks);
  }

  copy(): State {
    const made: State = Object.create(State.prototype);
    made.step = this.step;
    made.clock = this.clock;
    for (const name of ["readers", "findable", "released", "writer", "place", "pins"] as const)
      (made as unknown as Record<string, unknown>)[name] = this[name].slice();
    made.tables = new Map([...this.tables].map(([request, table]) => [request, table.slice()]));
    return made;
  }

  /** One block's event, in the order of the recording. */
  apply(code: number, block: number, request: number): void {
    switch (code) {
      case TAKE:
        this.readers[block] = 1;
        this.released[block] = 0;
        this.pins[block] = request < 0 ? 1 : 0;
        this.place[block] = this.tables.get(request)?.length ?? 0;
        this.writer[block] = request;
        this.push(request, block);
        break;
      case HOLD:
        this.readers[block]++;
        this.released[block] = 0;
        if (request < 0) this.pins[block]++;
        this.push(request, block);
        break;
      case FREE:
        if (this.readers[block] > 0) this.readers[block]--;
        if (request < 0) this.pins[block] = Math.max(0, this.pins[block] - 1);
        this.pop(request, block);
        if (this.readers[block] === 0 && this.findable[block]) this.released[block] = ++this.clock;
        break;
      case KNOW:
        this.findable[block] = 1;
        break;
      case FORGET:
        this.findable[block] = 0;
        this.released[block] = 0;
        break;
      case EVICT: // what it means follows: forget, then take
        break;
    }
  }

  applyAll(events: number[]): void {
    for (let i = 0; i + 2 < events.length; i += 3) this.apply(events[i], events[i + 1], events[i + 2]);
  }

  /** Cached blocks, the first to be evicted first. */
  lru(): number[] {
    const blocks = this.released.length, keys = new Float64Array(blocks); // numbers alone sort fastest: when, then which
    let count = 0;
    for (let block = 0; block < blocks; block++) if (this.released[block]) keys[count++] = this.released[block] * blocks + block;
    return Array.from(keys.subarray(0, count).sort(), (key) => key % blocks);
  }

  private push(request: number, block: number): void {
    if (request < 0) return;
    const table = this.tables.get(request);
    if (table) table.push(block);
    else this.tables.set(request, [block]);
  }

  private pop(request: number, block: number): void {
    const table = this.tables.get(request);
    if (!table) return;
    const at = table.lastIndexOf(block);
    if (at >= 0) table.splice(at, 1);
    if (!table.length) this.tables.delete(request);
  }
}

/** A request's life: what the recording says of it, gathered from all steps. */
export class Life {
  /** step, start, stop, token, kind, again and again; see ``SPAN``. */
  spans: number[] = [];
  preempted: number[] = [];
  /** Steps in which it was admitted, and how many tokens it found in the cache then. */
  admitted: number[] = [];
  found: number[] = [];
  /** Its stretches: first step, last step, what it does. */
  stretches: number[] = [];
  running = false;
  recomputes = false;

  constructor(public index: number, public facts: RequestFacts) {}

  /** How many spans lie at or before a step. */
  spansUntil(step: number): number {
    let low = 0, high = this.spans.length / SPAN;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.spans[middle * SPAN] <= step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  get prompt(): number { return this.facts.prompt.length; }

  /** How many tokens it has drawn, in all steps. */
  get drawn(): number {
    let count = 0;
    for (let i = 3; i < this.spans.length; i += SPAN) count += Number(this.spans[i] >= 0);
    return count;
  }

  /** The first step after whose decision it stands in the queue, or has been there. */
  get queued(): number {
    const { queued_step, before_step } = this.facts;
    return queued_step === undefined ? before_step : (queued_step ?? Infinity);
  }

  /** The first step after whose decision it neither waits nor runs. */
  get gone(): number {
    const { gone_step, end_step } = this.facts;
    return (gone_step === undefined ? end_step : gone_step) ?? Infinity;
  }
}

export const SPAN = 5;

/** A step in numbers, for the timeline. */
export interface Counts {
  prefill: Float64Array; decode: Float64Array; held: Float64Array; cached: Float64Array; arrivals: Float64Array;
  preempted: Float64Array; evicted: Float64Array; finished: Float64Array; hits: Float64Array;
}
const COUNTS = ["prefill", "decode", "held", "cached", "arrivals", "preempted", "evicted", "finished", "hits"] as const;

export class Replay {
  lives: Life[] = [];
  counts: Counts;
  /** Index of a step to the requests that arrived before it, and that ended after it. */
  arrivals = new Map<number, number[]>();
  endings = new Map<number, number[]>();
  private keyframes: State[] = [];
  private every: number;
  private end: State; // after all steps that are known
  private now: State;
  private held = 0;
  private cached = 0;

  constructor(public recording: Recording) {
    const blocks = recording.engine.num_blocks;
    const frame = blocks * 21;
    this.every = Math.max(EVERY, Math.ceil((recording.steps.length * frame) / MOST_KEYFRAME_BYTES));
    this.end = new State(blocks);
    this.now = new State(blocks);
    this.counts = Object.fromEntries(COUNTS.map((name) => [name, new Float64Array(0)])) as unknown as Counts;
    recording.requests.forEach((facts) => this.learn(facts));
    this.extend(0);
  }

  get length(): number { return this.recording.steps.length; }

  /** A new request, or what has changed of one. */
  learn(facts: RequestFacts, index = this.lives.length): void {
    const life = this.lives[index];
    const before = life?.facts;
    if (!life) {
      this.lives[index] = new Life(index, facts);
    } else {
      life.facts = facts;
    }
    if (!before) add(this.arrivals, facts.before_step, index);
    if (facts.end_step !== null && facts.end_step !== undefined && before?.end_step == null)
      add(this.endings, facts.end_step, index);
  }

  /** Read the steps from ``first`` on; those before it have been read. Cost: one pass over them. */
  extend(first: number): void {
    const steps = this.recording.steps;
    for (const name of COUNTS) {
      if (this.counts[name].length >= steps.length) continue;
      const longer = new Float64Array(Math.max(steps.length, first ? steps.length * 2 : 0));
      longer.set(this.counts[name]);
      this.counts[name] = longer;
    }
    for (let n = first; n < steps.length; n++) {
      if (n % this.every === 0) this.keyframes.push(this.end.copy());
      this.readSpans(n, steps[n]);
      this.readBlocks(n, steps[n].blocks);
      this.end.step = n;
    }
    for (const [n, requests] of this.arrivals) if (n < steps.length) this.counts.arrivals[n] = requests.length;
    for (const [n, requests] of this.endings) if (n < steps.length) this.counts.finished[n] = requests.length;
  }

  private readSpans(n: number, step: Step): void {
    for (const request of step.preempted) {
      const life = this.lives[request];
      if (!life) continue;
      life.preempted.push(n);
      life.running = false;
      life.recomputes = true;
      stretch(life, n, PREEMPTED);
    }
    let prefill = 0, decode = 0, hits = 0;
    for (const [request, start, stop, token] of step.spans) {
      const life = this.lives[request];
      if (!life) continue;
      if (!life.running) {
        life.running = true;
        life.admitted.push(n);
        life.found.push(start);
        if (start > 0) hits++;
      }
      const kind = start < life.prompt ? (life.recomputes ? RECOMPUTE : PREFILL) : life.recomputes ? RECOMPUTE : DECODE;
      if (token !== -1) life.recomputes = false;
      life.spans.push(n, start, stop, token, kind);
      stretch(life, n, kind === DECODE ? RUNNING_DECODE : RUNNING_PREFILL);
      if (kind === DECODE) decode += stop - start;
      else prefill += stop - start;
    }
    this.counts.prefill[n] = prefill;
    this.counts.decode[n] = decode;
    this.counts.hits[n] = hits;
    this.counts.preempted[n] = step.preempted.length;
  }

  private readBlocks(n: number, events: number[]): void {
    const { readers, released } = this.end;
    let evicted = 0;
    for (let i = 0; i + 2 < events.length; i += 3) {
      const block = events[i + 1];
      const held = readers[block] > 0, cached = released[block] > 0;
      this.end.apply(events[i], block, events[i + 2]);
      this.held += Number(readers[block] > 0) - Number(held);
      this.cached += Number(released[block] > 0) - Number(cached);
      if (events[i] === EVICT) evicted++;
    }
    this.counts.evicted[n] = evicted;
    this.counts.held[n] = this.held;
    this.counts.cached[n] = this.cached;
  }

  /** The books after a step's decision. The same object each time: read it before you ask again. */
  at(step: number): State {
    const steps = this.recording.steps;
    if (!steps.length) return this.now;
    step = Math.max(0, Math.min(step, steps.length - 1));
    if (this.now.step === step) return this.now;
    const frame = Math.floor(step / this.every);
    if (this.now.step > step || this.now.step < frame * this.every - 1) this.now = this.keyframes[frame].copy();
    while (this.now.step < step) {
      this.now.applyAll(steps[this.now.step + 1].blocks);
      this.now.step++;
    }
    return this.now;
  }

  /** The waiting queue after a step's decision, in order, its head first. */
  waiting(step: number): Life[] {
    return this.lives
      .filter((life) => life.queued <= step && !this.isRunning(life, step) && life.gone > step)
      .sort((a, b) => a.facts.rank - b.facts.rank || a.index - b.index);
  }

  /** Who runs after a step's decision, in that order too. */
  running(step: number): Life[] {
    return this.lives.filter((life) => this.isRunning(life, step)).sort((a, b) => a.facts.rank - b.facts.rank || a.index - b.index);
  }

  isRunning(life: Life, step: number): boolean {
    const admitted = lastAtMost(life.admitted, step), preempted = lastAtMost(life.preempted, step);
    return admitted >= 0 && admitted > preempted && life.gone > step;
  }

  /** Whether it ended before a step, so that the step knows nothing of it. */
  hasEnded(life: Life, step: number): boolean { return life.gone <= step; }

  /** Tokens whose keys and values the cache holds for a request after a step. */
  computed(life: Life, step: number): number {
    if (!this.isRunning(life, step)) return 0;
    const count = life.spansUntil(step);
    return count ? life.spans[(count - 1) * SPAN + 2] : 0;
  }

  /** The tokens that a request has drawn by a step: place in the request, token, step. */
  drawn(life: Life, step: number): [number, number, number][] {
    const found: [number, number, number][] = [];
    for (let i = 0, stop = life.spansUntil(step) * SPAN; i < stop; i += SPAN)
      if (life.spans[i + 3] >= 0) found.push([life.prompt + found.length, life.spans[i + 3], life.spans[i]]);
    return found;
  }
}

function add(map: Map<number, number[]>, step: number, request: number): void {
  const found = map.get(step);
  if (found) found.push(request);
  else map.set(step, [request]);
}

/** Let a life's last stretch reach to a step, or begin another. */
function stretch(life: Life, step: number, what: number): void {
  const { stretches } = life;
  const last = stretches.length - 3;
  if (last >= 0 && stretches[last + 2] === what && what !== PREEMPTED) stretches[last + 1] = step;
  else {
    if (last >= 0 && stretches[last + 2] === PREEMPTED) stretches[last + 1] = step - 1;
    stretches.push(step, step, what);
  }
}

/** The last of ascending numbers that is no greater than a limit; -1: none. */
export function lastAtMost(numbers: number[], limit: number): number {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low ? numbers[low - 1] : -1;
}

/** Numbers and steps in words. */

import { EVICT, FREE, HOLD, TAKE, type Wait } from "./format";
import type { Now } from "./player";
import { DECODE, RECOMPUTE, SPAN, type Life, type Replay } from "./replay";

export const MINUS = "−";

export function count(number: number, one: string, many = `${one}s`): string {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

export function whole(number: number): string {
  return Math.round(number).toLocaleString("en-US");
}

/** Microseconds, with a unit a reader likes. */
export function time(micros: number): string {
  const size = Math.abs(micros);
  if (size < 1000) return `${Math.round(micros)} µs`;
  if (size < 1e6) return `${(micros / 1e3).toFixed(size < 1e4 ? 2 : size < 1e5 ? 1 : 0)} ms`;
  return `${(micros / 1e6).toFixed(size < 1e7 ? 2 : 1)} s`;
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** "3, 5 and 9", or the first few and how many more. */
export function list(items: (string | number)[], most = 8): string {
  const shown = items.slice(0, most).map(String);
  if (items.length > most) return `${shown.join(", ")} and ${items.length - most} more`;
  return shown.length > 1 ? `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}` : (shown[0] ?? "");
}

/** What a request is called, here and by ``nanovllm explain``. */
export function nameOf(life: Life): string {
  return life.facts.sample ? `${life.facts.id}/${life.facts.sample}` : life.facts.id;
}

/** Why the head of the queue is not admitted. */
export function whyWaiting(wait: Wait, replay: Replay, step: number): string {
  const { engine } = replay.recording;
  switch (wait) {
    case "budget":
      return `the step's budget${engine.max_num_batched_tokens ? ` of ${whole(engine.max_num_batched_tokens)} tokens` : ""} is spent`;
    case "seqs":
      return `as many requests run as may${engine.max_num_seqs ? ` (${whole(engine.max_num_seqs)})` : ""}`;
    case "blocks": {
      const free = engine.num_blocks - replay.counts.held[step];
      return `too few blocks are free: ${whole(free)} of ${whole(engine.num_blocks)}, and each running request keeps one in reserve`;
    }
    case "preempted":
      return "somebody had to make room in this step, so nobody is admitted";
    case "prefix":
      return "another one is computing what its prompt begins with, and then it can be found";
    default:
      return "";
  }
}

const SHORTLY: Record<string, string> = {
  budget: "the step is full", seqs: "enough requests run", blocks: "too few blocks are free", preempted: "somebody had to make room",
  prefix: "another one computes what it begins with",
};

export const FINISHES: Record<string, string> = {
  stop: "it came to its stop", length: "it reached its limit of tokens", abort: "it was aborted", error: "an error ended it",
};

export function finish(life: Life): string {
  const { finish, stop, max_tokens } = life.facts;
  if (finish === "length" && life.drawn < max_tokens) return "it grew until the cache could hold no more of it";
  if (finish === "stop" && typeof stop === "string") return `it wrote its stop string ${JSON.stringify(stop)}`;
  return finish ? (FINISHES[finish] ?? finish) : "it goes on";
}

/** What an engine does whose recording is full, of what it has said lately. */
export function doingNow(nows: Now[], blocks: number): string {
  const [first, last] = [nows[0], nows.at(-1)!], passed = last.seconds - first.seconds;
  const rate = (name: "drawn_tokens" | "prompt_tokens") => whole(passed ? Math.max(0, last[name] - first[name]) / passed : 0);
  return `${whole(last.running)} running, ${whole(last.waiting)} waiting, ${whole(last.held)} of ${whole(blocks)} blocks in use, ` +
    `${whole(last.cached)} cached, ${rate("drawn_tokens")} tokens/s and ${rate("prompt_tokens")} of prompts.`;
}

export type Kind = "arrive" | "preempt" | "admit" | "prefill" | "decode" | "evict" | "blocks" | "wait" | "end" | "fail";

/** A sentence, and the request it is about, if it is about one. */
export interface Line { kind: Kind; text: string; requests: number[]; }

/** What happened in a step, in the order in which the engine did it. */
export function tell(replay: Replay, step: number): Line[] {
  const { recording, lives } = replay;
  const facts = recording.steps[step];
  if (!facts) return [];
  const name = (request: number) => (lives[request] ? nameOf(lives[request]) : String(request));
  const lines: Line[] = [];
  const say = (kind: Kind, text: string, requests: number[] = []) => lines.push({ kind, text, requests });
  const verb = (requests: unknown[], one: string, many: string) => `${requests.length === 1 ? "Request" : "Requests"} ${list(requests as string[])} ${requests.length === 1 ? one : many}`;

  const arrived = replay.arrivals.get(step) ?? [];
  if (arrived.length) say("arrive", `${verb(arrived.map(name), "arrives", "arrive")}.`, arrived);
  for (const request of facts.preempted)
    say("preempt", `Request ${name(request)} is preempted: it gives its blocks back, waits, and will be computed again.`, [request]);

  const evicted = new Map<number, number[]>(), taken = new Map<number, number>(), freed = new Set<number>();
  let shared = 0;
  for (let i = 0; i + 2 < facts.blocks.length; i += 3) {
    const [code, block, request] = [facts.blocks[i], facts.blocks[i + 1], facts.blocks[i + 2]];
    if (code === TAKE) taken.set(request, (taken.get(request) ?? 0) + 1);
    else if (code === FREE) freed.add(block);
    else if (code === HOLD) shared++;
    else if (code === EVICT) {
      const owner = request >= 0 ? request : ownerOfTake(facts.blocks, i);
      evicted.set(owner, [...(evicted.get(owner) ?? []), block]);
    }
  }
  if (evicted.size > 2) {
    const requests = [...evicted.keys()].filter((request) => request >= 0);
    const total = [...evicted.values()].reduce((sum, blocks) => sum + blocks.length, 0);
    say("evict", `${whole(total)} blocks, unused for longest, are evicted for requests ${list(requests.map(name))}.`, requests);
    evicted.clear();
  }
  for (const [request, blocks] of evicted) {
    const whom = request >= 0 ? ` for request ${name(request)}` : "";
    say("evict", `${blocks.length === 1 ? "Block" : "Blocks"} ${list(blocks)} ${blocks.length === 1 ? "is" : "are"} evicted${whom}: unused for longest.`,
      request >= 0 ? [request] : []);
  }

  const decoding: number[] = [];
  for (const [request, start, stop, token] of facts.spans) {
    const life = lives[request];
    if (!life) continue;
    const at = life.spansUntil(step) - 1;
    const kind = life.spans[at * SPAN + 4];
    if (kind === DECODE) {
      decoding.push(request);
      continue;
    }
    let before = "";
    const admitted = life.admitted.indexOf(step);
    if (admitted >= 0) {
      const found = life.found[admitted];
      const cached = found ? `${count(found, "token")} found in the cache (${count(found / recording.engine.block_size, "block")})` : "nothing of it is in the cache";
      const again = admitted > 0 ? "resumes" : "is admitted";
      before = `Request ${name(request)} ${again}: ${cached}. `;
    }
    const [chunk, chunks] = chunkOf(life, at);
    const part = chunks > 1 ? ` (chunk ${chunk} of ${chunks})` : "";
    const tokens = stop - start === 1 ? `token ${whole(start)}` : `tokens ${whole(start)}–${whole(stop - 1)}`;
    const what = kind === RECOMPUTE ? `computes ${tokens} again` : `gets prompt ${tokens}`;
    const draws = token >= 0 ? `, and draws ${quote(recording.texts[token], token)}` : "";
    say(before ? "admit" : "prefill", `${before}${before ? "It" : `Request ${name(request)}`} ${what}${part}${draws}.`, [request]);
  }
  if (decoding.length === 1) {
    const span = facts.spans.find(([request]) => request === decoding[0])!;
    const draws = span[3] >= 0 ? `: ${quote(recording.texts[span[3]], span[3])}` : "";
    say("decode", `Request ${name(decoding[0])} decodes one token${draws}.`, decoding);
  } else if (decoding.length) {
    say("decode", `${whole(decoding.length)} requests decode one token each:`, decoding);
  }
  const moved: string[] = [];
  const total = [...taken.values()].reduce((sum, number) => sum + number, 0);
  if (total) moved.push(`${whole(total)} taken`);
  if (shared) moved.push(`${whole(shared)} shared`);
  if (freed.size) moved.push(`${whole(freed.size)} given back`);
  if (moved.length) say("blocks", `Blocks: ${list(moved)}; ${whole(replay.counts.held[step])} of ${whole(recording.engine.num_blocks)} are held.`);

  if (facts.after) {
    const alive = lives.filter((life) => life.gone > step);
    say("end", alive.length ? `The recording ends; ${count(alive.length, "request")} had not come to an end.` : "The recording ends: nobody waits and nobody runs.");
  }
  const ended = replay.endings.get(step) ?? [];
  for (const request of ended.slice(0, 6)) say("end", `Request ${name(request)} ends: ${finish(lives[request])}.`, [request]);
  if (ended.length > 6) say("end", `${whole(ended.length - 6)} more requests end.`, ended.slice(6));
  const head = facts.wait ? replay.waiting(step)[0] : undefined;
  if (head) say("wait", `Request ${name(head.index)} waits: ${SHORTLY[facts.wait!] ?? facts.wait}.`, [head.index]);
  if (facts.failed) say("fail", `The step failed: ${facts.failed}`);
  return lines;
}

/** For whom an eviction makes room: the next take of the same block. */
function ownerOfTake(events: number[], from: number): number {
  for (let i = from + 3; i + 2 < events.length; i += 3)
    if (events[i] === TAKE && events[i + 1] === events[from + 1]) return events[i + 2];
  return -1;
}

/** Which chunk of how many a span is, in one stretch of prefilling. */
function chunkOf(life: Life, at: number): [number, number] {
  const { spans, admitted } = life;
  const prefills = (i: number) => i >= 0 && i * SPAN < spans.length && spans[i * SPAN + 4] !== DECODE;
  let first = at, last = at;
  while (prefills(first - 1) && !admitted.includes(spans[first * SPAN])) first--;
  while (prefills(last + 1) && !admitted.includes(spans[(last + 1) * SPAN])) last++;
  return [at - first + 1, last - first + 1];
}

/** A token's text, so that a reader sees its spaces and ends of lines. */
export function quote(text: string | undefined, token: number): string {
  return text === undefined ? `token ${token}` : `“${visible(text)}”`;
}

export function visible(text: string): string {
  const told = characters(text).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return told.replace(SIGNALS, (each) => (each < " " ? String.fromCharCode(0x2400 + each.charCodeAt(0)) : `<${each.charCodeAt(0).toString(16).toUpperCase()}>`)) || "∅";
}

/** What is not seen, but may turn the sentence around it. */
const SIGNALS = /[\0-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Bytes that are no whole character: the recording has surrogates for them, of their number. */
const BYTES = /[\udc80-\udcff]+/gu;

/** A text in which bytes that are characters together are these, and others are shown as numbers. */
function characters(text: string): string {
  return text.replace(BYTES, (found) => {
    const bytes = Uint8Array.from(found, (each) => each.charCodeAt(0) & 255);
    let made = "";
    for (let at = 0; at < bytes.length; ) {
      const size = sizeOf(bytes[at]), part = bytes.subarray(at, at + size);
      const character = size > 1 && part.length === size ? decode(part) : null;
      made += character ?? `<${bytes[at].toString(16).toUpperCase()}>`;
      at += character === null ? 1 : size;
    }
    return made;
  });
}

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function decode(bytes: Uint8Array<ArrayBuffer>): string | null {
  try {
    return decoder.decode(bytes);
  } catch {
    return null;
  }
}

/** How many bytes the character has that begins with this one; 1: none begins so. */
function sizeOf(byte: number): number { return byte >= 0xf0 && byte < 0xf8 ? 4 : byte >= 0xe0 && byte < 0xf0 ? 3 : byte >= 0xc0 && byte < 0xe0 ? 2 : 1; }

/** What each token adds to a text. A character that several make is the last one's. */
export function spell(tokens: number[], texts: Record<string, string>): string[] {
  let before = "";
  const found = tokens.map((token) => {
    const text = before + (texts[token] ?? `[${token}] `);
    const end = /[\udc80-\udcff]{1,3}$/u.exec(text)?.[0] ?? "";
    // the last of them that can begin a character, if it is not complete
    let cut = text.length;
    for (let at = end.length; at > 0; at--) {
      const size = sizeOf(text.charCodeAt(text.length - at) & 255);
      if (size > at) { cut = text.length - at; break; }
    }
    before = text.slice(cut);
    return characters(text.slice(0, cut));
  });
  if (before) found[found.length - 1] += characters(before);
  return found;
}

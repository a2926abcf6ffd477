/** A recording, version 1, as nanovllm/trace/recording.py describes it: times are whole microseconds since it began. */

export interface Engine {
  nanovllm?: string; model?: string; device?: string; device_name?: string; dtype?: string;
  block_size: number; num_blocks: number; max_num_seqs?: number; max_num_batched_tokens?: number;
  enable_prefix_caching?: boolean; policy?: string; started?: string;
}

export interface RequestFacts {
  id: string; sample: number; arrived: number; before_step: number; queued_step?: number | null; prompt: number[];
  priority: number; rank: number; max_tokens: number; params: Record<string, unknown>; cached: number;
  ended: number | null; end_step: number | null; gone_step?: number | null; finish: string | null; stop: string | number | null; text: string;
}

export type Wait = null | "budget" | "seqs" | "blocks" | "preempted" | "prefix";

export interface Step {
  /** began, decided, submitted, awaited, computed, settled */
  t: number[];
  /** [request, start, stop, token] */
  spans: number[][];
  preempted: number[];
  wait: Wait;
  /** code, block, request, again and again */
  blocks: number[];
  top?: Record<string, [number, number][]>;
  failed?: string;
  /** No step at all, but what became of the blocks after the last one. */
  after?: boolean;
}

export interface Recording {
  format: string; version: number; engine: Engine; texts: Record<string, string>;
  requests: RequestFacts[]; steps: Step[]; tail?: number[]; dropped_steps?: number;
}

export const VERSION = 1;

/** What happens to a block; the numbers are those of the file. */
export const TAKE = 0, HOLD = 1, FREE = 2, KNOW = 3, FORGET = 4, EVICT = 5;

/** A recording that this page cannot show, and why: the text is for the reader. */
export class Unreadable extends Error {}

/** Read and check what stands in the page; throws Unreadable. */
export function read(text: string): Recording {
  let found: unknown;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Unreadable(`The recording in this page is damaged: ${(error as Error).message}. Record it again.`);
  }
  return check(found);
}

export function check(found: unknown): Recording {
  const recording = found as Recording;
  if (typeof recording !== "object" || recording === null || recording.format !== "nanovllm recording")
    throw new Unreadable("What stands in this page is no recording of nanovllm.");
  if (recording.version !== VERSION)
    throw new Unreadable(
      `This recording has version ${recording.version} of the format; the page shows version ${VERSION}. ` +
      "Write the page with the nanovllm that recorded it.",
    );
  const engine = recording.engine;
  if (!Array.isArray(recording.steps) || !Array.isArray(recording.requests) || typeof engine !== "object" || !engine ||
      !(engine.block_size >= 1) || !(engine.num_blocks >= 0))
    throw new Unreadable("This recording lacks its engine, its requests or its steps. Record it again.");
  recording.texts ??= {};
  return recording;
}

/** Let what came after the last step be seen like a step. */
export function showTail(recording: Recording): void {
  const { steps, tail } = recording, last = steps.at(-1);
  if (last && tail?.length) steps.push({ t: Array(6).fill(last.t[5]), spans: [], preempted: [], wait: null, blocks: tail, after: true });
}

/** An empty recording, which live messages fill. */
export function empty(engine: Engine): Recording {
  return { format: "nanovllm recording", version: VERSION, engine, texts: {}, requests: [], steps: [], dropped_steps: 0 };
}

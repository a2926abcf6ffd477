/**
 * A page that watches a running engine.
 *
 * It is an ordinary page whose recording is empty:
 *
 *     <script type="application/json" id="recording" data-live="/events"></script>
 *
 * and it opens an EventSource on that address. Each message is one JSON object in ``data:``, with these keys, all
 * optional, in the words of the recording's format:
 *
 *     engine         begins anew: what the page has is forgotten. The first message of a stream has it, and so has the
 *                    first after a reconnection, unless the server goes on exactly behind the event that Last-Event-ID
 *                    names. ``version`` may stand beside it, and ``dropped_steps``: steps that came before.
 *     texts          texts of token ids not sent before
 *     requests       [{"index": 3, ...}]: all facts of a new request, or only those that have changed (``ended``,
 *                    ``end_step``, ``finish``, ``stop``, ``text``, ``cached``). Indexes are without gaps.
 *     steps          steps settled since the last message, in order. ``request`` and ``step`` are counted as in a
 *                    recording, so from the stream's own first step.
 *     dropped_steps  the number of steps that the server could not send, whenever it changes
 *     now            once the recording is full, about ten times a second while it changes, and again when it has not for
 *                    two seconds: ``seconds`` since the recording began; how many requests are ``running`` and
 *                    ``waiting``, how many blocks ``held`` and ``cached``; ``prompt_tokens`` computed and
 *                    ``drawn_tokens`` in the dropped steps
 *     behind         true: more is on its way already, as when a viewer comes late and is sent what has been
 *
 * An event of the name "end" is the last one: the engine is closed. It has the ``tail`` of the recording.
 *
 * Facts are read before steps, whatever their order in the message. Whoever joins late gets, as the first events of the
 * first step's ``blocks``, those that bring all blocks to where they are. Of more than MOST_STEPS steps the page takes none.
 */

import { check, empty, showTail, Unreadable, VERSION, type Engine, type RequestFacts, type Step } from "./format";
import type { Now, Player } from "./player";
import { Replay } from "./replay";
import { Axis } from "./timeline";

export const MOST_STEPS = 50_000;

export interface Message {
  engine?: Engine; version?: number; texts?: Record<string, string>; requests?: (Partial<RequestFacts> & { index: number })[];
  steps?: Step[]; dropped_steps?: number; now?: Now; tail?: number[];
}

/** Read messages for as long as the page is open. ``fail`` hears of what cannot be shown. */
export function listen(address: string, player: Player, fail: (error: Error) => void): EventSource {
  const source = new EventSource(address);
  const stop = (error: unknown) => {
    source.close();
    fail(error as Error);
  };
  source.onopen = () => { player.connected = true; player.changed(); };
  source.onerror = () => { player.connected = false; player.changed(); };
  source.addEventListener("end", (event) => { // else it would ask for ever for an engine that is gone
    source.close();
    const { replay } = player, before = replay.length;
    replay.recording.tail = (JSON.parse((event as MessageEvent<string>).data) as Message).tail;
    showTail(replay.recording);
    replay.extend(before);
    if (player.follow) player.go(player.last, { keep: true });
    player.view.fit(player.axis);
    player.closed = true;
    player.follow = false;
    player.changed();
  });
  source.onmessage = (event) => {
    try {
      receive(player, JSON.parse(event.data) as Message);
      if (player.replay.length > MOST_STEPS) {
        source.close();
        player.connected = true;
        player.notice = "This page holds as many steps as it can; reload it to go on from now.";
      }
    } catch (error) {
      stop(error);
    }
  };
  return source;
}

export function receive(player: Player, message: Message): void {
  if (message.engine) {
    const recording = empty(message.engine);
    check({ ...recording, version: message.version ?? VERSION });
    player.replay = new Replay(recording);
    player.axis = new Axis(player.replay, player.axis.mode);
    player.view.fit(player.axis);
    [player.cursor, player.selected, player.nows] = [0, -1, []];
  }
  const { replay } = player, { recording } = replay;
  Object.assign(recording.texts, message.texts);
  if (message.dropped_steps !== undefined) recording.dropped_steps = message.dropped_steps;
  if (message.now) player.hear(message.now);
  for (const { index, ...facts } of message.requests ?? []) {
    const known = recording.requests[index];
    if (!known && index !== recording.requests.length)
      throw new Unreadable(`Request ${index} came when only ${recording.requests.length} are known. Reload the page.`);
    const merged = { ...known, ...facts } as RequestFacts;
    recording.requests[index] = merged;
    if (!known && !index) player.selected = 0; // so that a text is seen at once
    replay.learn(merged, index);
  }
  const before = replay.length, whole = player.view.to >= player.axis.end;
  const all = player.view.from <= 0 && whole;
  if (message.steps?.length) recording.steps.push(...message.steps);
  replay.extend(before);
  if (player.follow) player.go(player.last, { keep: true });
  if (all) player.view.fit(player.axis);
  player.changed();
}

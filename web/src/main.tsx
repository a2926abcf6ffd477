/** Reads what stands in the page, and shows it. */

import { render } from "preact";
import { App } from "./app";
import { empty, read, showTail, Unreadable } from "./format";
import { listen } from "./live";
import { Player } from "./player";
import { Replay } from "./replay";

declare global {
  interface Window { nanovllm: { state: (step?: number) => unknown; player: Player } }
}

const root = document.getElementById("page")!;

function begin(): void {
  const script = document.getElementById("recording")!;
  const address = script.dataset.live;
  const recording = address ? empty({ block_size: 1, num_blocks: 0, model: "live" }) : read(script.textContent ?? "");
  showTail(recording);
  script.textContent = ""; // so that its text is not kept twice
  const player = new Player(new Replay(recording), matchMedia("(prefers-color-scheme: dark)").matches);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { player.dark = event.matches; player.changed(); });
  if (player.replay.lives.length) player.selected = 0; // so that a text is seen at once
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key === "step") player.go(Number(value) || 0);
    if (key === "request") player.selected = player.replay.lives[Number(value)] ? Number(value) : -1;
  }
  window.nanovllm = { player, state: (step = player.cursor) => stateOf(player, step) };
  if (address) {
    player.live = player.follow = true;
    player.connected = true;
    listen(address, player, refuse);
  }
  root.textContent = "";
  render(<App player={player} />, root);
}

/** What the page knows of a step, for whoever wants to check it. */
function stateOf(player: Player, step: number): unknown {
  const { replay } = player, state = replay.at(step);
  return {
    step, readers: [...state.readers], findable: [...state.findable], lru: state.lru(),
    tables: Object.fromEntries([...state.tables].sort(([a], [b]) => a - b)),
    waiting: replay.waiting(step).map((life) => life.index), running: replay.running(step).map((life) => life.index).sort((a, b) => a - b),
    cursor: player.cursor, selected: player.selected, playing: player.playing, follow: player.follow, connected: player.connected,
  };
}

function refuse(error: Error): void {
  render(null, root);
  const box = document.createElement("div");
  box.className = "refusal";
  box.setAttribute("role", "alert");
  const title = document.createElement("h1"), text = document.createElement("p");
  title.textContent = "This recording cannot be shown";
  text.textContent = error.message;
  box.append(title, text);
  root.replaceChildren(box);
}

try {
  begin();
} catch (error) {
  refuse(error as Error);
  if (!(error instanceof Unreadable)) throw error; // a fault of the page itself: the console has the place
}

/**
 * Colours that canvases need; style.css has the same ones for the rest.
 *
 * Ten hues for requests, chosen after Paul Tol's and Okabe and Ito's schemes so that neighbours in time differ for
 * colour-blind eyes too. Requests beyond the tenth use them again: a number and the tooltip tell them apart.
 */

export interface Theme {
  dark: boolean; ink: string; soft: string; faint: string; line: string; panel: string; cell: string; accent: string;
  alarm: string; requests: string[]; onRequest: string[]; prefill: string; decode: string; evicted: string; cached: [number, number, number][];
  phases: [string, string, string, string]; device: string; held: string;
}

const LIGHT: Theme = {
  dark: false, ink: "#1b1f24", soft: "#5d6673", faint: "#747e8b", line: "#e3e6ea", panel: "#ffffff", cell: "#f2f4f6",
  accent: "#0b62d6", alarm: "#c8321f",
  requests: ["#2f6fca", "#e08a1e", "#218764", "#c2497f", "#6f54c0", "#8a9a1f", "#c94a30", "#1f87a0", "#94622f", "#31418f"],
  onRequest: ["#fff", "#1b1f24", "#fff", "#fff", "#fff", "#1b1f24", "#fff", "#fff", "#fff", "#fff"],
  prefill: "#8db9f0", decode: "#0d4f9e", evicted: "#c77712", cached: [[226, 230, 236], [150, 161, 177], [0, 0, 0]],
  phases: ["#6f54c0", "#1f87a0", "#d5dae1", "#e08a1e"], device: "#218764", held: "#7d93b5",
};

const DARK: Theme = {
  dark: true, ink: "#e8ebef", soft: "#9aa4b2", faint: "#808b9a", line: "#2b313a", panel: "#171b21", cell: "#1f242c",
  accent: "#6ab0ff", alarm: "#ff7a66",
  requests: ["#5f9df0", "#eda03c", "#43bd93", "#e06c9f", "#9d86e8", "#a9b93e", "#ec7a5f", "#4dbbd2", "#c28f5b", "#e3d3a2"],
  onRequest: Array(10).fill("#12151a"),
  prefill: "#3d6fae", decode: "#a5cfff", evicted: "#eda03c", cached: [[48, 55, 66], [104, 117, 136], [0, 0, 0]],
  phases: ["#9d86e8", "#4dbbd2", "#363d48", "#eda03c"], device: "#43bd93", held: "#6d84a8",
};

export function theme(dark: boolean): Theme { return dark ? DARK : LIGHT; }

/** The colour of a request; -1 is nobody's: a pin. */
export function colourOf(request: number, of: Theme): string {
  return request < 0 ? of.soft : of.requests[request % of.requests.length];
}

export function inkOn(request: number, of: Theme): string {
  return request < 0 ? of.panel : of.onRequest[request % of.onRequest.length];
}

/** A cached block's grey: 0 is the next to be evicted, 1 was let go of last. */
export function greyOf(age: number, of: Theme): string {
  const [from, to] = of.cached;
  const mixed = from.map((value, i) => Math.round(value + (to[i] - value) * age));
  return `rgb(${mixed.join(",")})`;
}

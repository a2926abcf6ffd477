/** A canvas that is as sharp as the screen. */
export function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d")!;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

export const FONT = '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

/** Diagonal hatching in one colour, for what must be told apart without colours. */
export function hatch(pen: CanvasRenderingContext2D, colour: string): CanvasPattern {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const lines = tile.getContext("2d")!;
  lines.strokeStyle = colour;
  lines.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    lines.beginPath();
    lines.moveTo(shift, 6);
    lines.lineTo(shift + 6, 0);
    lines.stroke();
  }
  return pen.createPattern(tile, "repeat")!;
}

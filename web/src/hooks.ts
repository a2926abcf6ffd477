import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

/** The size of an element's inside, and again whenever it changes. */
export function useSize<T extends HTMLElement>(): [RefObject<T | null>, number, number] {
  const ref = useRef<T>(null);
  const [size, setSize] = useState<[number, number]>([0, 0]);
  useLayoutEffect(() => {
    const measure = () => ref.current && setSize([ref.current.clientWidth, ref.current.clientHeight]);
    measure();
    const observer = new ResizeObserver(measure);
    if (ref.current) observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, size[0], size[1]];
}

/** Listen with ``passive: false``, so that a wheel that zooms does not scroll the page as well. */
export function useWheel<T extends HTMLElement>(ref: RefObject<T | null>, onWheel: (event: WheelEvent) => void): void {
  const latest = useRef(onWheel);
  latest.current = onWheel;
  useEffect(() => {
    const element = ref.current;
    const listen = (event: WheelEvent) => latest.current(event);
    element?.addEventListener("wheel", listen, { passive: false });
    return () => element?.removeEventListener("wheel", listen);
  }, []);
}

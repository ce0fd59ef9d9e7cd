// Axes: places of values, and ticks at round numbers.
/** `place` maps a value to 0 (bottom) to 1 (top). The scale begins at 0 if that wastes little room. */
export function vertical(lines, panel) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const [, value] of line.points) { low = Math.min(low, value); high = Math.max(high, value); }
  const bound = panel.bound?.value;
  if (bound !== undefined && bound !== null && bound <= Math.max(high, 1e-9) * 4) high = Math.max(high, bound);
  if (panel.is_log && low > 0 && high / low > 20) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const ticks = Array.from({ length: to - from + 1 }, (_, index) => 10 ** (from + index));
    return { ticks: ticks.length > 6 ? ticks.filter((_, index) => index % 2 === 0) : ticks, high, place: (value) => (Math.log10(value) - from) / (to - from) };
  }
  if (low >= 0 && (low < high * 0.5 || high === 0)) low = 0;
  if (low === 0 && high === 0) high = 1;
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const ticks = nice(low, high, 4), room = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
  const [from, to] = [Math.min(low, ticks[0] ?? low), high > ticks.at(-1) + room * 0.05 ? ticks.at(-1) + room : high];
  if (to > ticks.at(-1) + room * 0.95) ticks.push(ticks.at(-1) + room);
  return { ticks, high: to, place: (value) => (value - from) / (to - from) };
}

/** About `count` round numbers between `low` and `high`. */
export function nice(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

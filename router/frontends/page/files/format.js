// Number formats: one unit and width per quantity.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export function rate(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (value >= 1e5) return `${(value / 1e3).toFixed(0)}k`;
  return value > 0 && value < 10 ? value.toFixed(1) : whole.format(value);
}

export function milliseconds(value) {
  const [number, unit] = duration(value);
  return `${number} ${unit}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return ["–", "ms"];
  if (ms >= 60e3) return [(ms / 60e3).toFixed(1), "min"];
  if (ms >= 1e3) return [(ms / 1e3).toFixed(ms >= 1e4 ? 1 : 2), "s"];
  return [ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
}

// Round numbers, as short as a scale wants them.
export function shortCount(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  return value >= 1e3 ? `${Number((value / 1e3).toPrecision(3))}k` : String(Number(value.toPrecision(3)));
}

// Round durations, without trailing zeros.
export function shortDuration(ms) {
  if (ms >= 60e3) return `${Number((ms / 60e3).toPrecision(3))} min`;
  return ms >= 1e3 ? `${Number((ms / 1e3).toPrecision(3))} s` : `${Number(ms.toPrecision(3))} ms`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let i = 0;
  while (value >= 1000 && i < units.length - 1) [value, i] = [value / 1000, i + 1];
  return `${i === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[i]}`;
}

const clockTime = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const time = (seconds) => clockTime.format(new Date(seconds * 1000));

export function age(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

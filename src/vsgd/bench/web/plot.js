// Charts as SVG: lines, bands and dots on linear or logarithmic axes, in the colors of the page.

const SVG = Object.assign(document.createElement("div"), { innerHTML: "<svg></svg>" }).firstChild.namespaceURI;

function make(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// A color of the package; page.css has another shade of it for dark mode.
const themed = (color) => `var(--c${color.slice(1)}, ${color})`;

const superscript = (digits) => [...String(digits)].map((d) => (d === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[d])).join("");

// A number in few digits: 0.0123, 150, 10⁻⁴, 2.5·10⁷.
function short(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 1e5) || !Number.isFinite(value)) return String(Number(value.toPrecision(3)));
  const [front, power] = value.toExponential(1).replace(".0", "").split("e");
  return `${front === "1" ? "" : `${front}·`}10${superscript(Number(power))}`;
}

function linearTicks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step);
  return ticks;
}

function logTicks(low, high, base, wanted) {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / wanted));
  const ticks = [];
  for (let k = first; k <= last; k += every) ticks.push(base ** k);
  return ticks.length > 1 ? ticks : [1, 2, 3, 5].flatMap((m) => [m * base ** (first - 1), m * base ** first]).filter((t) => t >= low && t <= high);
}

// {min, max, margin, log, base, ticks, format} → a function to pixels, and its ticks.
function axisOf(options, values, from, to, wanted) {
  const usable = values.filter((v) => Number.isFinite(v) && (!options.log || v > 0));
  let low = options.min ?? usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = options.max ?? usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(low <= high)) [low, high] = options.log ? [1, 10] : [0, 1];
  if (low === high) [low, high] = options.log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const transform = options.log ? Math.log : (v) => v, back = options.log ? Math.exp : (v) => v;
  const margin = options.margin * (transform(high) - transform(low));
  if (options.min === undefined) low = back(transform(low) - margin);
  if (options.max === undefined) high = back(transform(high) + margin);
  const a = transform(low), b = transform(high);
  const place = (v) => from + ((transform(v) - a) / (b - a)) * (to - from);
  const ticks = options.ticks ?? (options.log ? logTicks(low, high, options.base ?? 10, wanted) : linearTicks(low, high, wanted));
  return { place, low, high, ticks: ticks.filter((t) => t >= low * (1 - 1e-9) && t <= high * (1 + 1e-9)), format: options.format ?? short };
}

// Consecutive points that can be shown, joined; a value outside of the frame is kept near it.
function pathOf(series, values, x, y, bounds) {
  let text = "", drawing = false;
  values.forEach((value, i) => {
    const at = series.x[i];
    const shown = Number.isFinite(value) && (!y.log || value > 0) && Number.isFinite(at) && (!x.log || at > 0);
    if (shown) {
      const height = Math.max(bounds[0], Math.min(bounds[1], y.place(value))).toFixed(1);
      const left = x.place(at).toFixed(1);
      text += drawing ? (series.step ? `H${left}V${height}` : `L${left},${height}`) : `M${left},${height}`;
    }
    drawing = shown;
  });
  return text;
}

function bandOf(series, x, y, bounds) {
  const [low, high] = series.band;
  const kept = series.x.map((_, i) => i).filter((i) => low[i] > (y.log ? 0 : -Infinity) && Number.isFinite(low[i]) && (!x.log || series.x[i] > 0));
  if (kept.length < 2) return "";
  const pixel = (i, v) => `${x.place(series.x[i]).toFixed(1)},${Math.max(bounds[0], Math.min(bounds[1], Number.isFinite(v) ? y.place(v) : bounds[0])).toFixed(1)}`;
  return `M${kept.map((i) => pixel(i, high[i])).join("L")}L${kept.reverse().map((i) => pixel(i, low[i])).join("L")}Z`;
}

let clips = 0;

// Draws {title, x, y, height, series, marks, legend} into an element. A series is {x, y, color, label, width, dash, opacity, band,
// dots, step}; a mark is a line at {x} or {y} with a label.
function plot(target, chart) {
  const width = Math.max(240, target.clientWidth || 360), height = chart.height ?? 240;
  const left = 46, right = width - 8, top = 8, bottom = height - 34;
  const series = chart.series.filter((s) => s);
  const x = axisOf({ ...chart.x, margin: 0 }, series.flatMap((s) => s.x), left, right, Math.max(4, Math.floor(width / 75)));
  const marked = (chart.marks ?? []).flatMap((mark) => ("y" in mark ? [mark.y] : []));
  const y = axisOf({ ...chart.y, margin: 0.04 }, [...series.flatMap((s) => [...s.y, ...(s.band?.[1] ?? [])]), ...marked], bottom, top, 6);
  x.log = chart.x.log;
  y.log = chart.y.log;
  const bounds = [top - 200, bottom + 200], clip = `clip${clips++}`;
  const svg = make("svg:svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  svg.append(make("svg:clipPath", { id: clip }, make("svg:rect", { x: left, y: top - 3, width: right - left, height: bottom - top + 6 })));
  for (const tick of x.ticks) {
    const at = x.place(tick);
    svg.append(make("svg:line", { class: "tick", x1: at, x2: at, y1: top, y2: bottom }), make("svg:text", { x: at, y: bottom + 14, "text-anchor": "middle" }, x.format(tick)));
  }
  for (const tick of y.ticks) {
    const at = y.place(tick);
    svg.append(make("svg:line", { class: "tick", x1: left, x2: right, y1: at, y2: at }), make("svg:text", { x: left - 5, y: at + 4, "text-anchor": "end" }, y.format(tick)));
  }
  svg.append(make("svg:text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, chart.x.label ?? ""));
  const inside = make("svg:g", { "clip-path": `url(#${clip})` });
  for (const mark of chart.marks ?? []) {
    const [x1, x2, y1, y2] = "x" in mark ? [x.place(mark.x), x.place(mark.x), top, bottom] : [left, right, y.place(mark.y), y.place(mark.y)];
    inside.append(make("svg:line", { class: "mark", x1, x2, y1, y2 }));
    if (mark.label) inside.append(make("svg:text", { x: x1 + 4, y: "x" in mark ? top + 9 : y1 - 4 }, mark.label));
  }
  for (const s of [...series].sort((a, b) => (a.width ?? 2) - (b.width ?? 2))) {  // thick lines on top
    const color = themed(s.color);
    if (s.band) inside.append(make("svg:path", { d: bandOf(s, x, y, bounds), style: `fill: ${color}; opacity: .14` }));
    if (s.dots) {
      s.x.forEach((at, i) => s.y[i] >= y.low && inside.append(make("svg:circle", { cx: x.place(at).toFixed(1), cy: y.place(s.y[i]).toFixed(1), r: 1.4, style: `fill: ${color}; opacity: .55` })));
      continue;
    }
    const style = `fill: none; stroke: ${color}; stroke-width: ${s.width ?? 2}; opacity: ${s.opacity ?? 1}; stroke-dasharray: ${s.dash ?? "none"}`;
    const line = make("svg:path", { class: s.label ? "line" : "", d: pathOf(s, s.y, x, y, bounds), style });
    if (s.label) line.append(make("svg:title", {}, s.label));
    inside.append(line);
  }
  svg.append(inside);
  target.replaceChildren(svg);
  if (chart.legend !== false) target.append(legendOf(series.filter((s) => s.label)));
}

function legendOf(series) {
  return make("ul", { class: "legend" }, ...series.map((s) => {
    const style = `stroke: ${themed(s.color)}; stroke-width: ${Math.min(4, (s.width ?? 2) + 1)}; stroke-dasharray: ${s.dots ? "3 4" : s.dash ?? "none"}`;
    return make("li", {}, make("svg:svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, make("svg:line", { x1: 0, x2: 26, y1: 4, y2: 4, style })), s.label);
  }));
}

// Call now, and again when the window has another width.
function drawn(draw) {
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (width !== window.innerWidth) draw();
    width = window.innerWidth;
  });
  draw();
}

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
  if (value === 0 || (size >= 1e-3 && size < 1e5) || !Number.isFinite(value))
    return String(Number(value.toPrecision(3)));
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
  return ticks.length > 1
    ? ticks
    : [1, 2, 3, 5].flatMap((m) => [m * base ** (first - 1), m * base ** first]).filter((t) => t >= low && t <= high);
}

// {min, max, margin, log, base, ticks, format} → a function to pixels, and its ticks.
function axisOf(options, values, from, to, wanted) {
  const usable = values.filter((v) => Number.isFinite(v) && (!options.log || v > 0));
  let low = options.min ?? usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = options.max ?? usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(low <= high)) [low, high] = options.log ? [1, 10] : [0, 1];
  if (low === high) [low, high] = options.log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const transform = options.log ? Math.log : (v) => v,
    back = options.log ? Math.exp : (v) => v;
  const margin = options.margin * (transform(high) - transform(low));
  if (options.min === undefined) low = back(transform(low) - margin);
  if (options.max === undefined) high = back(transform(high) + margin);
  const a = transform(low),
    b = transform(high),
    tolerance = 1e-9 * (high - low);
  const place = (v) => from + ((transform(v) - a) / (b - a)) * (to - from);
  const ticks =
    options.ticks ?? (options.log ? logTicks(low, high, options.base ?? 10, wanted) : linearTicks(low, high, wanted));
  return {
    place,
    log: options.log,
    ticks: ticks.filter((t) => t >= low - tolerance && t <= high + tolerance),
    format: options.format ?? short,
  };
}

// How far beyond the frame a line may lead, in pixels; what is beyond is clipped.
const BEYOND = 200;

// A frame of axes: the pixel of a point, and whether the point is finite.
function frameOf(x, y, top, bottom) {
  const height = (v) => Math.max(top - BEYOND, Math.min(bottom + BEYOND, v === Infinity ? -Infinity : y.place(v)));
  return {
    shows: (at, v) => Number.isFinite(at) && (!x.log || at > 0) && Number.isFinite(v) && (!y.log || v > 0),
    point: (at, v) => [x.place(at).toFixed(1), height(v).toFixed(1)],
  };
}

// Lines through consecutive finite points.
function pathOf({ x, y, step }, frame) {
  let drawing = false;
  const parts = x.map((at, i) => {
    const shown = frame.shows(at, y[i]),
      joined = drawing;
    drawing = shown;
    if (!shown) return "";
    const [left, height] = frame.point(at, y[i]);
    return !joined ? `M${left},${height}` : step ? `H${left}V${height}` : `L${left},${height}`;
  });
  return parts.join("");
}

// The area between two curves where the lower one is finite. The upper one may be infinite.
function bandOf({ x, band: [low, high] }, frame) {
  const finite = x.map((_, i) => i).filter((i) => frame.shows(x[i], low[i]));
  const upper = finite.map((i) => frame.point(x[i], high[i])),
    lower = finite.map((i) => frame.point(x[i], low[i]));
  return finite.length > 1 ? `M${[...upper, ...lower.reverse()].join("L")}Z` : "";
}

const strokeOf = ({ color, width = 2, dash = "none" }) =>
  `fill: none; stroke: ${themed(color)}; stroke-width: ${width}; stroke-dasharray: ${dash ?? "none"}`;

// A short piece of a line, for legends.
function swatchOf(series) {
  const line = make("svg:line", { x1: 0, x2: 26, y1: 4, y2: 4, style: strokeOf(series) });
  return make("svg:svg", { class: "swatch", viewBox: "0 0 26 8", "aria-hidden": "true" }, line);
}

function drawSeries(series, frame) {
  const fill = (opacity) => `fill: ${themed(series.color)}; opacity: ${opacity}`;
  if (series.dots) {
    return series.x.map((at, i) => {
      const [cx, cy] = frame.point(at, series.y[i]);
      return make("svg:circle", { cx, cy, r: 1.4, style: fill(0.55) });
    });
  }
  const band = series.band ? [make("svg:path", { d: bandOf(series, frame), style: fill(0.14) })] : [];
  const line = make("svg:path", {
    class: series.label ? "line" : "",
    d: pathOf(series, frame),
    style: strokeOf(series),
  });
  if (series.label) line.append(make("svg:title", {}, series.label));
  return [...band, line];
}

let clips = 0;

// Draws {title, x, y, height, series, marks, legend} into an element. A series is {x, y, color, label, width, dash, band,
// dots, step}; a mark is a line at {x} or {y} with a label.
function plot(target, { title, series, marks = [], height = 240, legend = true, ...axes }) {
  const width = Math.max(240, target.clientWidth || 360),
    clip = `clip${clips++}`;
  const [left, right, top, bottom] = [46, width - 8, 8, height - 34];
  const marked = marks.flatMap((mark) => ("y" in mark ? [mark.y] : []));
  const values = [...series.flatMap((s) => [...s.y, ...(s.band?.[1] ?? [])]), ...marked];
  const ticks = Math.max(4, Math.floor(width / 75));
  const x = axisOf(
    { margin: 0, ...axes.x },
    series.flatMap((s) => s.x),
    left,
    right,
    ticks,
  );
  const y = axisOf({ margin: 0.04, ...axes.y }, values, bottom, top, 6);
  const line = (kind, x1, x2, y1, y2) => make("svg:line", { class: kind, x1, x2, y1, y2 });
  const text = (at, down, anchor, words) => make("svg:text", { x: at, y: down, "text-anchor": anchor }, words);

  const ground = [
    ...x.ticks.map((tick) => line("tick", x.place(tick), x.place(tick), top, bottom)),
    ...y.ticks.map((tick) => line("tick", left, right, y.place(tick), y.place(tick))),
    ...x.ticks.map((tick) => text(x.place(tick), bottom + 14, "middle", x.format(tick))),
    ...y.ticks.map((tick) => text(left - 5, y.place(tick) + 4, "end", y.format(tick))),
    text((left + right) / 2, height - 4, "middle", axes.x.label ?? ""),
  ];
  const inside = marks.flatMap((mark) =>
    "x" in mark
      ? [
          line("mark", x.place(mark.x), x.place(mark.x), top, bottom),
          text(x.place(mark.x) + 4, top + 9, "start", mark.label ?? ""),
        ]
      : [line("mark", left, right, y.place(mark.y), y.place(mark.y))],
  );
  const frame = frameOf(x, y, top, bottom),
    thickLast = [...series].sort((a, b) => (a.width ?? 2) - (b.width ?? 2));
  inside.push(...thickLast.flatMap((s) => drawSeries(s, frame)));
  const opening = make("svg:rect", { x: left, y: top - 3, width: right - left, height: bottom - top + 6 });
  const svg = make("svg:svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  svg.append(
    make("svg:clipPath", { id: clip }, opening),
    ...ground,
    make("svg:g", { "clip-path": `url(#${clip})` }, ...inside),
  );
  const labels = series
    .filter((s) => s.label)
    .map((s) => make("li", {}, swatchOf(s.dots ? { ...s, dash: "3 4" } : s), s.label));
  target.replaceChildren(svg, ...(legend ? [make("ul", { class: "legend" }, ...labels)] : []));
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

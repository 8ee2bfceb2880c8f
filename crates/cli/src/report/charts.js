"use strict";
// Charts of the report: the numbers under the pointer, and a part of the steps from end to end of the axis. Nothing is loaded. Without this script the
// drawings are as they are.
// An svg's data-plot has the pixels of its axes' ends (left, right, upper, lower) and the numbers there; the data-lines of what holds it a list of
// [name, colour, [[step, value], ..]].
function chart(svg, lines) {
  const [left, right, upper, lower, first, last, least, most] = svg.dataset.plot.split(" ").map(Number);
  const drawn = [...svg.children];
  const make = (parent, name, attributes, text) => {
    const element = svg.ownerDocument.createElementNS(svg.namespaceURI, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  };
  const zoomed = make(svg, "g", {}), tip = make(svg, "g", {"pointer-events": "none"});
  let steps = [first, last], values = [least, most], from = null;
  const short = (x) => String(Number(x.toPrecision(5)));
  const stepAt = (x) => steps[0] + (x - left) / (right - left) * (steps[1] - steps[0]);
  const across = (step) => left + (step - steps[0]) / (steps[1] - steps[0]) * (right - left);
  const down = (value) => lower - (value - values[0]) / (values[1] - values[0]) * (lower - upper);
  const pointer = (event) => {
    const box = svg.getBoundingClientRect(), wide = svg.viewBox.baseVal.width || Number(svg.getAttribute("width"));
    return Math.min(right, Math.max(left, (event.clientX - box.left) * wide / box.width));
  };
  const nearest = (points, step) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
  const show = (group, on) => { group.style.display = on ? "" : "none"; };

  function reset() {
    [steps, values] = [[first, last], [least, most]];
    drawn.forEach((part) => show(part, true));
    zoomed.replaceChildren();
  }

  function zoom(a, b) {
    const inside = lines.map(([name, colour, points]) => [name, colour, points.filter((p) => p[0] >= a && p[0] <= b)]);
    const seen = inside.flatMap(([, , points]) => points.map((p) => p[1]));
    if (new Set(inside.flatMap(([, , points]) => points.map((p) => p[0]))).size < 2) return;
    const [low, high] = [Math.min(...seen), Math.max(...seen)], margin = (high - low) * 0.06 || Math.abs(high) || 1;
    [steps, values] = [[a, b], [low - margin, high + margin]];
    drawn.forEach((part) => show(part, false));
    zoomed.replaceChildren();
    make(zoomed, "rect", {x: left, y: upper, width: right - left, height: lower - upper, fill: "#fff", stroke: "#bbb"});
    for (let i = 0; i <= 4; i++) {
      const step = a + (b - a) * i / 4, value = values[0] + (values[1] - values[0]) * i / 4;
      make(zoomed, "text", {x: across(step), y: lower + 18, "text-anchor": "middle", "font-size": 13}, short(Math.round(step)));
      make(zoomed, "text", {x: left - 6, y: down(value) + 4, "text-anchor": "end", "font-size": 13}, short(value));
    }
    for (const [, colour, points] of inside) {
      const at = points.map((p) => across(p[0]) + "," + down(p[1])).join(" ");
      make(zoomed, "polyline", {points: at, fill: "none", stroke: colour, "stroke-width": 2});
    }
  }

  function hover(x) {
    tip.replaceChildren();
    const seen = lines.map(([name, colour, points]) => [name, colour, points.filter((p) => p[0] >= steps[0] && p[0] <= steps[1])]);
    const told = seen.filter(([, , points]) => points.length).map(([name, colour, points]) => [name, colour, nearest(points, stepAt(x))]);
    if (!told.length) return;
    const texts = told.map(([name, , p]) => name + "  step " + short(p[0]) + ": " + short(p[1]));
    const wide = Math.max(...texts.map((text) => text.length)) * 7.2 + 16, tall = texts.length * 17 + 8;
    const at = x + 10 + wide > right ? x - 10 - wide : x + 10;
    make(tip, "line", {x1: x, x2: x, y1: upper, y2: lower, stroke: "#888"});
    if (from !== null) {
      make(tip, "rect", {x: Math.min(x, from), y: upper, width: Math.abs(x - from), height: lower - upper, fill: "#14508c", opacity: 0.15});
    }
    make(tip, "rect", {x: at, y: upper + 6, width: wide, height: tall, fill: "#fff", stroke: "#bbb"});
    told.forEach(([, colour], i) => make(tip, "text", {x: at + 8, y: upper + 22 + 17 * i, "font-size": 13, fill: colour}, texts[i]));
  }

  svg.addEventListener("pointerdown", (event) => { from = pointer(event); event.preventDefault(); });
  svg.addEventListener("pointermove", (event) => hover(pointer(event)));
  svg.addEventListener("pointerleave", () => { from = null; tip.replaceChildren(); });
  svg.addEventListener("pointerup", (event) => {
    const to = pointer(event), [a, b] = [stepAt(Math.min(from, to)), stepAt(Math.max(from, to))];
    if (from !== null && Math.abs(to - from) > 5) zoom(a, b);
    from = null;
  });
  svg.addEventListener("dblclick", reset);
}
if (typeof document !== "undefined") {
  for (const holder of document.querySelectorAll("[data-lines]")) {
    const svg = holder.querySelector("svg[data-plot]");
    if (svg) chart(svg, JSON.parse(holder.dataset.lines));
  }
}

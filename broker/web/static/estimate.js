// Draws tokens/s over the number of GPUs, both on logarithmic axes, with the interval as a band.
const section = document.querySelector("[data-scaling]");
const style = getComputedStyle(section);
const data = JSON.parse(section.dataset.scaling);
const whole = (v) => (v == null ? "–" : Math.round(v).toLocaleString("en"));
const axis = { stroke: style.color, grid: { stroke: style.borderTopColor, width: 1 }, ticks: { stroke: style.borderTopColor } };
const line = style.caretColor;
const edge = { stroke: "transparent", points: { show: false }, value: (_, v) => whole(v) };
const short = (v) => (v == null ? "" : Intl.NumberFormat("en", { notation: "compact" }).format(v));
const tens = (_, __, low, high) => {
  const first = Math.floor(Math.log10(low));
  return Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, i) => 10 ** (first + i));
};
const plot = new uPlot({
  width: section.clientWidth,
  height: 260,
  scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3 } },
  axes: [
    { ...axis, label: "GPUs", splits: () => data.gpus, values: (_, ticks) => ticks.map(whole), space: 24 },
    { ...axis, label: "tokens/s", size: 64, splits: tens, values: (_, ticks) => ticks.map(short) },
  ],
  series: [
    { label: "GPUs", value: (_, v) => whole(v) },
    { label: "from", ...edge },
    { label: "to", ...edge },
    { label: "in proportion", stroke: style.color, dash: [6, 4], width: 1, points: { show: false }, value: (_, v) => whole(v) },
    { label: "tokens/s", stroke: line, width: 2, points: { show: true, size: 6 }, value: (_, v) => whole(v) },
  ],
  bands: [{ series: [2, 1], fill: style.outlineColor }],
}, [data.gpus, data.low, data.high, data.linear, data.rate], section);
addEventListener("resize", () => plot.setSize({ width: section.clientWidth, height: 260 }));

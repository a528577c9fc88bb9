// Draws loss and speed of a run over its steps, with a line at each interruption, and again when the run has changed.
const section = document.querySelector("[data-plot]");
const colour = (name) => getComputedStyle(section)[name];
let plots = [];
let loading = false;

const marks = (interruptions) => ({
  hooks: {
    draw: [(plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour("color");
      ctx.font = `${12 * devicePixelRatio}px sans-serif`;
      ctx.globalAlpha = 0.7;
      for (const { step, reason } of interruptions) {
        const x = Math.round(plot.valToPos(step, "x", true));
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.textAlign = x > bbox.left + bbox.width * 0.8 ? "right" : "left";
        ctx.fillText(` ${reason} `, x, bbox.top + 12 * devicePixelRatio);
      }
      ctx.restore();
    }],
  },
});

const curve = (data, key, label, format) => {
  const axis = { stroke: colour("color"), grid: { stroke: colour("borderTopColor"), width: 1 }, ticks: { stroke: colour("borderTopColor") } };
  const value = (_, v) => (v == null ? "–" : format(v));
  return new uPlot({
    width: section.clientWidth,
    height: 220,
    scales: { x: { time: false } },
    axes: [{ ...axis, label: "step" }, { ...axis, label, size: 64, values: (_, ticks) => ticks.map((t) => format(t)) }],
    series: [{ label: "step" }, { label, stroke: colour("caretColor"), width: 1.5, spanGaps: true, value, points: { show: data.step.length < 60 } }],
    plugins: [marks(data.interruptions)],
  }, [data.step, data[key]], section);
};

const draw = async () => {
  if (loading) return;
  loading = true;
  try {
    const answer = await fetch(section.dataset.plot, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const data = await answer.json();
    if (data.step.length < 2) return;
    section.querySelector(".empty")?.remove();
    section.querySelector(".note").hidden = !data.skipped_bytes;
    plots.forEach((plot) => plot.destroy());
    plots = [
      curve(data, "loss", "loss", (v) => v.toFixed(3)),
      curve(data, "tokens_per_s", "tokens/s", (v) => Math.round(v).toLocaleString("en")),
    ];
  } finally {
    loading = false;
  }
};

if (section) {
  draw();
  document.body.addEventListener("htmx:sseMessage", draw);
  addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: section.clientWidth, height: 220 })));
}

// Draws loss, learning rate and speed of several runs over their steps, one colour and dash for each run.
const section = document.querySelector("[data-compare]");
const style = getComputedStyle(section);
const heads = [...document.querySelectorAll("[data-run]")];
const plots = [];
const KINDS = [
  ["loss", "loss", (v) => v.toFixed(3)],
  ["lr", "learning rate", (v) => v.toExponential(1)],
  ["tokens_per_s", "tokens/s", (v) => Math.round(v).toLocaleString("en")],
];

const read = async (head, index) => {
  const run = {
    name: `${index + 1} ${head.querySelector("a").textContent}`,
    stroke: getComputedStyle(head.querySelector("svg")).color,
    dash: head.dataset.dash === "0" ? [8, 4] : [],
  };
  try {
    const answer = await fetch(head.dataset.run, { headers: { Accept: "application/json" } });
    return answer.ok ? { ...run, data: await answer.json() } : { ...run, fault: true };
  } catch {
    return { ...run, fault: true };
  }
};

const plot = (runs, [key, label, format]) => {
  const shown = runs.filter((run) => run.data.step.length > 1 && run.data[key].some((v) => v != null));
  if (!shown.length) return;
  const axis = { stroke: style.color, grid: { stroke: style.borderTopColor, width: 1 }, ticks: { stroke: style.borderTopColor } };
  const value = (_, v) => (v == null ? "–" : format(v));
  const series = shown.map(({ name, stroke, dash, data }) => (
    { label: name, stroke, dash, width: 1.5, spanGaps: true, value, points: { show: data.step.length < 40 } }));
  plots.push(new uPlot({
    width: section.clientWidth,
    height: 220,
    scales: { x: { time: false } },
    axes: [{ ...axis, label: "step" }, { ...axis, label, size: 72, values: (_, ticks) => ticks.map((t) => format(t)) }],
    series: [{ label: "step" }, ...series],
  }, uPlot.join(shown.map(({ data }) => [data.step, data[key]])), section));
};

const draw = async () => {
  const runs = [];
  for (const [index, head] of heads.entries()) runs.push(await read(head, index)); // the daemon reads one at a time
  const lost = runs.filter((run) => run.fault).map((run) => run.name);
  const cut = runs.filter((run) => run.data?.skipped_bytes).map((run) => run.name);
  const notes = [
    lost.length ? `The curves of ${lost.join(", ")} could not be read; load the page again.` : "",
    cut.length ? `The journals of ${cut.join(", ")} are long, so their curves show the end.` : "",
  ].filter(Boolean);
  if (notes.length) {
    section.querySelector(".note").textContent = notes.join(" ");
    section.querySelector(".note").hidden = false;
  }
  for (const kind of KINDS) plot(runs.filter((run) => run.data), kind);
  if (plots.length) section.querySelector(".empty").remove();
};

draw();
addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: section.clientWidth, height: 220 })));

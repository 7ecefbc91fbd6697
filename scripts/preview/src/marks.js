// What a chart over time carries besides its series: annotations as lines or bands, exemplars as diamonds.
const done = new WeakSet();

/** The exemplars of a panel: [time in ms, value]. */
export const exemplars = (panel, drawing) => Object.values(drawing.answers[panel.id]?.targets ?? {})
  .flatMap((answer) => answer.exemplars ?? [])
  .map(({ timestamp, value }) => [timestamp * 1000, Number(value)]);

const HALF = 4;

/** Exemplars as diamonds, those that lie on the plot; `height(value)` is the place of a value in pixels. */
export function diamonds({ ctx, bbox, root, valToPos }, all, height, color) {
  const points = all.map(([time, value]) => [valToPos(time, 'x', true), height(value)]).filter(([x, y]) =>
    x >= bbox.left && x <= bbox.left + bbox.width && y >= bbox.top && y <= bbox.top + bbox.height);
  root.dataset.exemplars = points.length;
  ctx.fillStyle = color;
  for (const [x, y] of points) {
    ctx.beginPath();
    ctx.moveTo(x, y - HALF);
    ctx.lineTo(x + HALF, y);
    ctx.lineTo(x, y + HALF);
    ctx.lineTo(x - HALF, y);
    ctx.fill();
  }
}

/** Draw the annotations over a plot of uPlot. */
export function annotate(plot, drawing) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { color, events } of drawing.annotations ?? []) {
    for (const { time, timeEnd } of events) {
      const [left, right] = [time, timeEnd ?? time].map((at) => plot.valToPos(at, 'x', true));
      ctx.globalAlpha = 0.1;
      ctx.fillStyle = color;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.globalAlpha = 0.9;
      ctx.strokeStyle = color;
      ctx.setLineDash([5, 5]);
      ctx.beginPath();
      for (const at of right > left ? [left, right] : [left]) {
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
      }
      ctx.stroke();
    }
  }
  ctx.restore();
}

/** Add annotations and exemplars to a chart, once. */
export function marked(builder, { panel, drawing }) {
  if (done.has(builder)) {
    return;
  }
  done.add(builder);
  builder.addHook('draw', (plot) => {
    annotate(plot, drawing);
    diamonds(plot, exemplars(panel, drawing), (value) => plot.valToPos(value, plot.series[1].scale, true), '#e02f44');
  });
}

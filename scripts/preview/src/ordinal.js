// A plot of uPlot over time whose y axis has a slot per row, for the charts that @grafana/ui lacks.
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { measureText, UPlotConfigBuilder } from '@grafana/ui';

import { annotate } from './marks.js';

/**
 * The configuration of such a plot: `rows` slots counted from the bottom, `ticks` as [place, text] on the y axis
 * (if `thinned`, halved as Grafana's heatmap does where they would touch), and `draw(plot, box)`, where
 * box(time, timeEnd, row, rowEnd) is a rectangle.
 */
export function overRows({ theme, timeZone, timeRange, rows, ticks, grid, thinned, drawing, draw }) {
  const builder = new UPlotConfigBuilder(timeZone);
  builder.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right,
    range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()],
  });
  builder.addScale({
    scaleKey: 'y', orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: () => [0, rows],
  });
  builder.addAxis({
    scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme, grid: { show: grid },
  });
  const named = new Map(ticks);
  builder.addAxis({
    scaleKey: 'y', placement: AxisPlacement.Left, theme, grid: { show: grid },
    size: 24 + Math.max(...ticks.map(([, text]) => measureText(text, 12).width)),
    splits: (plot) => {
      let kept = ticks.map(([at]) => at);
      while (thinned && kept.length > 3 && (plot.height - 15) / kept.length < 10) {
        kept = kept.filter((_, place) => place % 2 === 0);
      }
      return kept;
    },
    values: (_, splits) => splits.map((at) => named.get(at)),
  });
  builder.addSeries({ scaleKey: 'y', theme, pathBuilder: () => null, pointsBuilder: () => null, show: true });
  builder.setPrepData(() => []);
  builder.addHook('draw', (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    draw(plot, (time, timeEnd, row, rowEnd) => {
      const [left, right] = [time, timeEnd].map((at) => Math.round(plot.valToPos(at, 'x', true)));
      const [bottom, top] = [row, rowEnd].map((at) => Math.round(plot.valToPos(at, 'y', true)));
      return [left, top, right - left, bottom - top];
    });
    ctx.restore();
    annotate(plot, drawing);
  });
  return builder;
}

/** The data that such a plot is given: times, and a row that nobody draws. */
export const carrier = (timeRange, rows) =>
  [[timeRange.from.valueOf(), timeRange.to.valueOf()], [0, rows]];

// A heatmap of a histogram's buckets over time, drawn by this project with uPlot.
import { colorManipulator, formattedValueToString, getValueFormat } from '@grafana/data';
import { UPlotChart, useTheme2, VizLayout } from '@grafana/ui';
import { useMemo } from 'react';

import { diamonds, exemplars } from '../marks.js';
import { carrier, overRows } from '../ordinal.js';

const RAMPS = {
  Oranges: ['#fdd0a2', '#fd8d3c', '#d94801', '#7f2704'],
  Blues: ['#c6dbef', '#6baed6', '#2171b5', '#08306b'],
  Spectral: ['#3288bd', '#abdda4', '#fee08b', '#d53e4f'],
};
const STEPS = 64;

function ramp(options, dark) {
  const stops = RAMPS[options.color?.scheme] ?? RAMPS.Oranges;
  const ordered = dark === Boolean(options.color?.reverse) ? stops : [...stops].reverse();
  const rgb = ordered.map((color) => colorManipulator.decomposeColor(color).values);
  return Array.from({ length: STEPS }, (_, step) => {
    const at = (step / (STEPS - 1)) * (rgb.length - 1);
    const low = Math.min(rgb.length - 2, Math.floor(at));
    const mixed = rgb[low].map((from, part) => Math.round(from + (rgb[low + 1][part] - from) * (at - low)));
    return `rgb(${mixed.join(',')})`;
  });
}

const formatted = (unit, decimals) => (value) =>
  (Number.isFinite(value) ? formattedValueToString(getValueFormat(unit || 'short')(value, decimals)) : '+Inf');

/** The slot of a value, as a place on the y axis: whole numbers are the upper bounds of the buckets. */
export function slot(bounds, value) {
  const row = bounds.findIndex((bound) => value <= bound);
  const [low, high] = [bounds[row - 1] ?? 0, bounds[row]];
  return row < 0 ? bounds.length : row + (Number.isFinite(high) ? (value - low) / (high - low) : 0.5);
}

function Scale({ colors, most, format }) {
  return (
    <div style={{ display: 'flex', alignItems: 'center', fontSize: 12, gap: 6, padding: '0 8px', height: 20 }}>
      <span>0</span>
      <span style={{ width: 120, height: 8, background: `linear-gradient(to right, ${colors.join(',')})` }} />
      <span>{format(most)}</span>
    </div>
  );
}

export function Heatmap({ panel, frames, width, height, timeRange, timeZone, drawing }) {
  const theme = useTheme2();
  const options = panel.options ?? {};
  const frame = frames.find(({ meta }) => meta?.bounds);
  if (!frame) {
    throw new Error('A heatmap needs a target of format heatmap.');
  }
  const colors = ramp(options, theme.isDark);
  const [time, ...rows] = frame.fields;
  const most = Math.max(0, ...rows.flatMap(({ values }) => values.filter((value) => value !== null)));
  const builder = useMemo(() => {
    const { bounds } = frame.meta;
    const bound = formatted(options.yAxis?.unit, options.yAxis?.decimals);
    // A name that is no number is shown as it is: so a board can name one bound.
    const label = ({ config }, value) => (isNaN(Number(config.displayName ?? 0)) ? config.displayName : bound(value));
    const step = time.config.interval;
    const exponent = options.color?.exponent ?? 0.5;
    return overRows({
      theme, timeZone, timeRange, drawing, grid: false, thinned: true, rows: rows.length,
      ticks: bounds.map((value, row) => [row + 1, label(rows[row], value)]),
      draw: (plot, box) => {
        rows.forEach(({ values }, row) => values.forEach((value, column) => {
          if (value > (options.filterValues?.le ?? 1e-9)) {
            const shade = Math.round(((value / most) ** exponent) * (STEPS - 1));
            plot.ctx.fillStyle = colors[shade];
            const [left, top, w, h] = box(time.values[column] - step, time.values[column], row, row + 1);
            plot.ctx.fillRect(left, top, Math.max(1, w - 1), Math.max(1, h - 1));
          }
        }));
        diamonds(plot, exemplars(panel, drawing), (value) => plot.valToPos(slot(bounds, value), 'y', true),
          options.exemplars?.color ?? '#ff00ff');
      },
    });
  }, []);
  const legend = options.legend?.show === false ? null : (
    <VizLayout.Legend placement="bottom" maxHeight="20%">
      <Scale colors={colors} most={most} format={formatted(options.cellValues?.unit, options.cellValues?.decimals)} />
    </VizLayout.Legend>
  );
  return (
    <VizLayout width={width} height={height} legend={legend}>
      {(w, h) => <UPlotChart config={builder} data={carrier(timeRange, rows.length)} width={w} height={h} />}
    </VizLayout>
  );
}

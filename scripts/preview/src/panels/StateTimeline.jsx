// States over time, one row per series, drawn by this project with uPlot.
import { FieldType, formattedValueToString, getFieldDisplayName } from '@grafana/data';
import { UPlotChart, useTheme2, VizLayout, VizLegend } from '@grafana/ui';
import { useMemo } from 'react';

import { carrier, overRows } from '../ordinal.js';

/** Spans of one value: [from, to, value]. A gap of more than one step ends a span. */
export function spans(times, values, step, end) {
  const found = [];
  times.forEach((at, place) => {
    const value = values[place];
    if (value === null || value === undefined || Number.isNaN(value)) {
      return;
    }
    const until = Math.min(times[place + 1] ?? end, at + (step || end - at), end);
    const last = found.at(-1);
    if (last && last[1] === at && last[2] === value) {
      last[1] = until;
    } else {
      found.push([at, until, value]);
    }
  });
  return found;
}

function rowsOf(frames, timeRange) {
  const end = timeRange.to.valueOf();
  return frames.flatMap((frame) => {
    const time = frame.fields.find(({ type }) => type === FieldType.time);
    return time ? frame.fields.filter(({ type }) => type !== FieldType.time).map((field) => ({
      name: getFieldDisplayName(field, frame, frames), display: field.display,
      spans: spans(time.values, field.values, time.config.interval, end),
    })) : [];
  });
}

export function StateTimeline({ panel, frames, width, height, timeRange, timeZone, drawing }) {
  const theme = useTheme2();
  const options = panel.options ?? {};
  const rows = rowsOf(frames, timeRange);
  const shown = rows.map(({ display, spans: all }) =>
    all.map(([from, to, value]) => ({ from, to, ...told(display(value)) })));
  const builder = useMemo(() => overRows({
    theme, timeZone, timeRange, drawing, grid: false, thinned: false, rows: rows.length,
    ticks: rows.map(({ name }, place) => [rows.length - place - 0.5, name]),
    draw: ({ ctx }, box) => shown.forEach((states, place) => states.forEach(({ from, to, text, color }) => {
      const middle = rows.length - place - 0.5;
      const half = (options.rowHeight ?? 0.9) / 2;
      const [left, top, w, h] = box(from, to, middle - half, middle + half);
      ctx.fillStyle = color;
      ctx.fillRect(left, top, w, h);
      ctx.font = `${12 * devicePixelRatio}px Inter, sans-serif`;
      if (options.showValue !== 'never' && ctx.measureText(text).width + 8 < w && h > 14 * devicePixelRatio) {
        ctx.fillStyle = theme.colors.getContrastText(color);
        ctx.textAlign = 'left';
        ctx.textBaseline = 'middle';
        ctx.fillText(text, left + 4, top + h / 2);
      }
    })),
  }), []);
  const items = [...new Map(shown.flat().sort((one, other) => one.order - other.order)
    .map(({ text, color }) => [text, { label: text, color, yAxis: 1 }])).values()];
  const legend = options.legend?.showLegend === false ? null : (
    <VizLayout.Legend placement="bottom" maxHeight="35%">
      <VizLegend items={items} displayMode="list" placement="bottom" />
    </VizLayout.Legend>
  );
  return (
    <VizLayout width={width} height={height} legend={legend}>
      {(w, h) => <UPlotChart config={builder} data={carrier(timeRange, rows.length)} width={w} height={h} />}
    </VizLayout>
  );
}

const told = (value) => ({
  text: formattedValueToString(value), color: value.color ?? '#808080', order: value.numeric,
});

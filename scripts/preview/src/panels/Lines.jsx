import { applyNullInsertThreshold, FieldType } from '@grafana/data';
import { TimeSeries } from '@grafana/ui';
import { useMemo } from 'react';

import { marked } from '../marks.js';

// A series ends where it has no sample at the next step: TimeSeries itself looks for such gaps in the first frame only.
const gapped = (frames, timeRange) => frames.map((frame) => applyNullInsertThreshold({
  frame: { ...frame, fields: frame.fields.map((field) => ({ ...field, state: { ...field.state } })) },
  refFieldPseudoMin: timeRange.from.valueOf(), refFieldPseudoMax: timeRange.to.valueOf(),
}));

export function Lines({ panel, frames, width, height, timeRange, timeZone, drawing }) {
  const legend = { displayMode: 'list', placement: 'bottom', calcs: [], showLegend: true, ...panel.options?.legend };
  const graphable = useMemo(() => gapped(
    frames.filter(({ fields }) => fields.some(({ type }) => type === FieldType.number)), timeRange), [frames]);
  return (
    <TimeSeries frames={graphable} width={width} height={height} timeRange={timeRange} timeZone={timeZone}
      legend={legend}>
      {(builder) => { marked(builder, { panel, drawing }); return null; }}
    </TimeSeries>
  );
}

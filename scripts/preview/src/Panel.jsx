import { PanelChrome, useTheme2 } from '@grafana/ui';
import { Component } from 'react';

import { BarChart } from './panels/BarChart.jsx';
import { BarGauges } from './panels/BarGauges.jsx';
import { Heatmap } from './panels/Heatmap.jsx';
import { Lines } from './panels/Lines.jsx';
import { Stat } from './panels/Stat.jsx';
import { StateTimeline } from './panels/StateTimeline.jsx';
import { TableOf } from './panels/TableOf.jsx';
import { Text } from './panels/Text.jsx';

// The last three have no component in @grafana/ui; what draws them here is of this project and says so.
const KINDS = {
  stat: { draw: Stat, empty: true },
  text: { draw: Text, empty: true },
  bargauge: { draw: BarGauges },
  table: { draw: TableOf },
  timeseries: { draw: Lines },
  barchart: { draw: BarChart, own: true },
  heatmap: { draw: Heatmap, own: true },
  'state-timeline': { draw: StateTimeline, own: true },
};

function Message({ text, height, failed }) {
  const theme = useTheme2();
  return (
    <div data-message style={{
      height, display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center', fontSize: 14,
      overflow: 'hidden', color: failed ? theme.colors.error.text : theme.colors.text.secondary,
    }}>{text}</div>
  );
}

class Guarded extends Component {
  state = { error: null };

  static getDerivedStateFromError(error) {
    return { error: String(error.message ?? error) };
  }

  render() {
    return this.state.error
      ? <div data-failed={this.state.error}><Message text={this.state.error} height={this.props.height} failed /></div>
      : this.props.children;
  }
}

function Own() {
  const theme = useTheme2();
  return (
    <span data-own style={{ fontSize: 10, color: theme.colors.text.disabled, whiteSpace: 'nowrap' }}>
      drawn by kvobs, not by Grafana
    </span>
  );
}

const points = (frames) => frames.reduce((sum, { length }) => sum + length, 0);

export function Panel({ panel, frames, fieldConfig, error, style, timeRange, timeZone, drawing }) {
  const { left, top, width, height } = style;
  const kind = KINDS[panel.type];
  const problem = error ?? (kind ? null : `No renderer for panels of type ${panel.type}.`);
  const empty = !points(frames);
  const draw = (innerWidth, innerHeight) => {
    if (problem) {
      return <Message text={problem} height={innerHeight} failed />;
    }
    if (empty && !kind.empty) {
      return <Message text={panel.fieldConfig?.defaults?.noValue ?? 'No data'} height={innerHeight} />;
    }
    const Draw = kind.draw;
    return (
      <Guarded height={innerHeight}>
        <Draw panel={panel} frames={frames} fieldConfig={fieldConfig} width={innerWidth} height={innerHeight}
          timeRange={timeRange} timeZone={timeZone} drawing={drawing} />
      </Guarded>
    );
  };
  return (
    <section style={{ position: 'absolute', left, top, width, height }} data-panel={panel.id} data-type={panel.type}
      data-title={panel.title} data-empty={empty} data-frames={frames.length} data-error={problem ?? undefined}>
      <PanelChrome width={width} height={height} title={panel.title} description={panel.description}
        displayMode={panel.transparent ? 'transparent' : 'default'} padding={panel.type === 'table' ? 'none' : 'md'}
        titleItems={kind?.own ? <Own /> : undefined}>
        {draw}
      </PanelChrome>
    </section>
  );
}

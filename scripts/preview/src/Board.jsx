import { dateTime, dateTimeFormat } from '@grafana/data';
import { Icon, useTheme2 } from '@grafana/ui';
import { useEffect } from 'react';

import { heightOf, place } from './layout.js';
import { Panel } from './Panel.jsx';

function Pill({ name, value }) {
  const theme = useTheme2();
  const border = `1px solid ${theme.colors.border.medium}`;
  return (
    <span style={{ display: 'inline-flex', marginRight: 8, marginBottom: 6, fontSize: 12 }}>
      <span style={{ padding: '4px 8px', border, background: theme.colors.background.secondary }}>{name}</span>
      <span style={{ padding: '4px 8px', border, borderLeft: 0, color: theme.colors.text.secondary }}>{value}</span>
    </span>
  );
}

function Head({ drawing, range, timeZone }) {
  const theme = useTheme2();
  const { board, variables } = drawing;
  const shown = (board.templating?.list ?? []).filter(({ hide }) => !hide);
  const at = (time, format) => dateTimeFormat(time, { timeZone, format });
  return (
    <header style={{ margin: '4px 0 6px' }}>
      <div style={{ display: 'flex', alignItems: 'baseline', justifyContent: 'space-between', marginBottom: 8 }}>
        <span style={{ fontSize: 18, fontWeight: 500 }} data-board>{board.title}</span>
        <span style={{ fontSize: 12, color: theme.colors.text.secondary }}>
          {drawing.caption ? `${drawing.caption} · ` : ''}
          {at(range.from, 'YYYY-MM-DD HH:mm:ss')} to {at(range.to, 'HH:mm:ss')} UTC
        </span>
      </div>
      {shown.map(({ name, label }) => <Pill key={name} name={label || name} value={variables[name] ?? ''} />)}
      {(board.annotations?.list ?? []).filter(({ hide, builtIn }) => !hide && !builtIn).map(({ name, iconColor }) => (
        <span key={name}
          style={{ fontSize: 12, marginRight: 10, color: theme.visualization.getColorByName(iconColor) }}>
          ▲ {name}
        </span>
      ))}
      {(board.links ?? []).map(({ title }) => (
        <span key={title} style={{ fontSize: 12, marginRight: 10 }}><Icon name="link" size="sm" /> {title}</span>
      ))}
    </header>
  );
}

function Row({ panel, style }) {
  return (
    <div style={{ ...style, position: 'absolute', display: 'flex', alignItems: 'center', fontWeight: 500 }}
      data-row={panel.title}>
      <Icon name="angle-down" /> {panel.title}
    </div>
  );
}

export function Board({ drawing, panels, timeZone }) {
  const range = { from: dateTime(drawing.from), to: dateTime(drawing.to) };
  const timeRange = { ...range, raw: range };
  const width = drawing.width - 32;
  useEffect(() => {
    // Two frames later everything that measures itself has been drawn.
    requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.drawn = 'yes'; }));
  }, []);
  return (
    <main style={{ padding: 16, width: drawing.width, boxSizing: 'border-box', fontFamily: 'Inter, sans-serif' }}>
      <Head drawing={drawing} range={range} timeZone={timeZone} />
      <div style={{ position: 'relative', height: heightOf(panels.map(({ panel }) => panel)) }}>
        {panels.map((prepared) => {
          const { panel } = prepared;
          const style = place(panel.gridPos, width);
          return panel.type === 'row'
            ? <Row key={panel.id} panel={panel} style={style} />
            : <Panel key={panel.id} {...prepared} style={style} timeRange={timeRange} timeZone={timeZone}
                drawing={drawing} />;
        })}
      </div>
    </main>
  );
}

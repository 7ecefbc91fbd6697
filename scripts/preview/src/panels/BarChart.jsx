// Stacked bars, one per row of a table, drawn by this project; @grafana/ui has no such component.
import { FieldType, formattedValueToString, getFieldDisplayName, getFieldSeriesColor } from '@grafana/data';
import { useTheme2, VizLayout, VizLegend } from '@grafana/ui';

const AXIS = 24;
const LETTER = 6.8;

/** Round places on an axis from 0 to at least `most`; powers of two where the unit counts in them. */
export function ticks(most, binary) {
  const base = binary ? 2 ** Math.floor(Math.log2(most / 4 || 1)) : 10 ** Math.floor(Math.log10(most / 4 || 1));
  const step = (binary ? [1, 2, 4] : [1, 2, 5, 10]).map((times) => times * base).find((one) => most / one <= 6) ?? most;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, place) => place * step);
}

function Bar({ parts, y, height, scale, theme }) {
  let left = 0;
  return parts.filter(({ value }) => value > 0).map(({ name, value, text, color }) => {
    const [x, width] = [scale(left), scale(left + value) - scale(left)];
    left += value;
    return (
      <g key={name} data-part={name} data-text={text}>
        <rect x={x} y={y} width={Math.max(1, width)} height={height} fill={color} fillOpacity={0.8} />
        {text.length * LETTER + 6 < width && (
          <text x={x + width / 2} y={y + height / 2} dominantBaseline="central" textAnchor="middle" fontSize={12}
            fill={theme.colors.text.maxContrast}>{text}</text>
        )}
      </g>
    );
  });
}

function Chart({ bars, fields, width, height, theme }) {
  const left = Math.min(width / 3, 12 + LETTER * Math.max(...bars.map(({ name }) => name.length)));
  const most = Math.max(0, ...bars.map(({ parts }) => parts.reduce((sum, { value }) => sum + Math.max(0, value), 0)));
  const scale = (value) => left + (value / (most * 1.02 || 1)) * (width - left - 24);
  const slot = (height - AXIS) / bars.length;
  const places = ticks(most, /bytes|Bps/i.test(fields[0].config.unit ?? ''));
  return (
    <svg width={width} height={height} style={{ display: 'block', fontFamily: 'Inter, sans-serif' }}>
      {places.map((at) => (
        <g key={at}>
          <line x1={scale(at)} x2={scale(at)} y1={0} y2={height - AXIS} stroke={theme.colors.border.weak} />
          <text x={scale(at)} y={height - 6} fontSize={12} textAnchor="middle" fill={theme.colors.text.primary}>
            {formattedValueToString(fields[0].display(at))}
          </text>
        </g>
      ))}
      {bars.map(({ name, parts }, place) => (
        <g key={name} data-bar={name}>
          <text x={left - 8} y={(place + 0.5) * slot} fontSize={12} textAnchor="end" dominantBaseline="central"
            fill={theme.colors.text.primary}>{name}</text>
          <Bar parts={parts} y={place * slot + slot * 0.15} height={slot * 0.7} scale={scale} theme={theme} />
        </g>
      ))}
    </svg>
  );
}

export function BarChart({ panel, frames, width, height }) {
  const theme = useTheme2();
  const [frame] = frames;
  const named = frame.fields.find(({ name, type }) => name === panel.options?.xField || type === FieldType.string);
  const fields = frame.fields.filter(({ type }) => type === FieldType.number);
  const series = fields.map((field) => ({
    field, name: getFieldDisplayName(field, frame, frames), color: getFieldSeriesColor(field, theme).color,
  }));
  const bars = Array.from({ length: frame.length }, (_, row) => ({
    name: String(named?.values[row] ?? row),
    parts: series.map(({ field, name, color }) => ({
      name, color, value: field.values[row] ?? 0, text: formattedValueToString(field.display(field.values[row])),
    })),
  }));
  const items = series.map(({ name, color }) => ({ label: name, color, yAxis: 1 }));
  const legend = (
    <VizLayout.Legend placement="bottom" maxHeight="35%">
      <VizLegend items={items} displayMode="list" placement="bottom" />
    </VizLayout.Legend>
  );
  return (
    <VizLayout width={width} height={height} legend={panel.options?.legend?.showLegend === false ? null : legend}>
      {(w, h) => <Chart bars={bars} fields={fields} width={w} height={h} theme={theme} />}
    </VizLayout>
  );
}

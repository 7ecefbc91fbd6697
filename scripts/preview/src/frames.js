// Answers of Prometheus as data frames, in the three formats that a target can ask for.
import { FieldType } from '@grafana/data';

// A sample of Prometheus is text: "NaN" and "+Inf" are numbers too.
const number = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

const metricText = ({ __name__: name = '', ...labels }) =>
  `${name}{${Object.entries(labels).map(([key, value]) => `${key}="${value}"`).join(', ')}}`;

/** What a series is called: by its target's legend, by its labels, or by the query where it has none. */
export function legend(target, labels) {
  const format = target.legendFormat;
  let name = metricText(labels);
  if (format === '__auto') {
    name = Object.keys(labels).length ? '' : name;
  } else if (format) {
    name = format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  return name === '{}' ? target.expr : name;
}

function samples(answer) {
  if (answer.resultType === 'matrix') {
    return answer.result.map(({ metric, values }) => ({ labels: metric, values }));
  }
  if (answer.resultType === 'vector') {
    return answer.result.map(({ metric, value }) => ({ labels: metric, values: [value] }));
  }
  return answer.result ? [{ labels: {}, values: [answer.result] }] : [];
}

const times = (values, interval) => ({
  name: 'Time', type: FieldType.time, config: { interval }, values: values.map(([at]) => Math.round(at * 1000)),
});

function series(target, answer, interval) {
  return samples(answer).map(({ labels, values }) => {
    const name = legend(target, labels);
    const value = {
      name: 'Value', type: FieldType.number, labels, config: name ? { displayNameFromDS: name } : {},
      values: values.map(([, text]) => number(text)),
    };
    return { refId: target.refId, name, fields: [times(values, interval), value], length: values.length, meta: {} };
  });
}

function table(target, answer, several) {
  const rows = samples(answer).flatMap(({ labels, values }) => values.map((value) => ({ labels, value })));
  if (!rows.length) {
    return [];
  }
  const keys = [...new Set(rows.flatMap(({ labels }) => Object.keys(labels)))].sort();
  const fields = [
    times(rows.map(({ value }) => value)),
    ...keys.map((key) => ({
      name: key, type: FieldType.string, config: { filterable: true },
      values: rows.map(({ labels }) => labels[key] ?? ''),
    })),
    {
      name: several ? `Value #${target.refId}` : 'Value', type: FieldType.number, config: {},
      values: rows.map(({ value: [, text] }) => number(text)),
    },
  ];
  return [{ refId: target.refId, fields, length: rows.length, meta: {} }];
}

/** Cumulative buckets of a histogram as one frame of a row per bucket: what fell into each bucket itself. */
function buckets(target, answer, interval) {
  const sorted = samples(answer)
    .map((one) => ({ ...one, bound: number(one.labels.le) }))
    .sort((a, b) => a.bound - b.bound);
  if (!sorted.length) {
    return [];
  }
  const at = [...new Set(sorted.flatMap(({ values }) => values.map(([time]) => time)))].sort((a, b) => a - b);
  const columns = sorted.map(({ values }) => new Map(values.map(([time, text]) => [time, number(text)])));
  const own = columns.map((column, place) => at.map((time) => {
    const value = column.get(time);
    const below = place ? columns[place - 1].get(time) : 0;
    return value === undefined || below === undefined ? null : Math.max(0, value - below);
  }));
  const fields = [times(at.map((time) => [time]), interval), ...own.map((values, place) => ({
    name: sorted[place].labels.le, type: FieldType.number, labels: sorted[place].labels,
    config: {}, values,
  }))];
  return [{ refId: target.refId, fields, length: at.length, meta: { bounds: sorted.map(({ bound }) => bound) } }];
}

/** All frames of a panel, from the answers by refId. */
export function frames(panel, answers) {
  const targets = (panel.targets ?? []).filter(({ refId, hide }) => !hide && answers?.targets?.[refId]?.result);
  const several = targets.filter(({ format }) => format === 'table').length > 1;
  return targets.flatMap((target) => {
    const answer = answers.targets[target.refId];
    if (target.format === 'table') {
      return table(target, answer, several);
    }
    return target.format === 'heatmap'
      ? buckets(target, answer, answers.interval)
      : series(target, answer, answers.interval);
  });
}

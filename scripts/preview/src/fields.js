// Field configuration and transformations, applied by @grafana/data as Grafana applies them.
import {
  applyFieldOverrides, identityOverrideProcessor, standardTransformers, standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { firstValueFrom } from 'rxjs';

// What the panel types of Grafana set where a board says nothing.
const THRESHOLDS = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
const LINES = {
  drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', spanNulls: false,
  insertNulls: false, showPoints: 'auto', pointSize: 5, stacking: { mode: 'none', group: 'A' }, axisPlacement: 'auto',
  axisLabel: '', axisColorMode: 'text', axisBorderShow: false, scaleDistribution: { type: 'linear' },
  axisCenteredZero: false, hideFrom: { tooltip: false, viz: false, legend: false }, thresholdsStyle: { mode: 'off' },
};
const CUSTOM = {
  timeseries: LINES,
  barchart: { fillOpacity: 80, lineWidth: 1, hideFrom: LINES.hideFrom },
  'state-timeline': { fillOpacity: 70, lineWidth: 0, hideFrom: LINES.hideFrom },
  table: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false },
};
const COLORED_BY_SERIES = new Set(['timeseries', 'barchart', 'heatmap']);

/** Register the transformations once. */
export function registerTransformations() {
  // Some stand there under two names.
  const all = new Map(Object.values(standardTransformers).map((info) => [info.id, info]));
  standardTransformersRegistry.setInit(() => [...all.values()].map((info) => ({
    id: info.id, name: info.name, transformation: () => Promise.resolve(info), editor: () => null,
  })));
}

/** A registry of whatever properties a configuration names: the id says where each belongs. */
function registryOf({ defaults, overrides }) {
  const ids = new Set(Object.keys(defaults).filter((id) => id !== 'custom'));
  Object.keys(defaults.custom ?? {}).forEach((key) => ids.add(`custom.${key}`));
  overrides.forEach(({ properties }) => properties.forEach(({ id }) => ids.add(id)));
  const item = (id) => ({
    id, name: id, isCustom: id.startsWith('custom.'), path: id.replace(/^custom\./, ''), settings: {},
    process: identityOverrideProcessor, shouldApply: () => true,
  });
  return { getIfExists: (id) => (ids.has(id) ? item(id) : undefined), list: () => [...ids].map(item) };
}

// JSON has no infinity: the first step of thresholds has no value there.
function thresholds(given) {
  const steps = given.steps.map((step) => ({ ...step, value: step.value ?? -Infinity }));
  return { ...given, steps };
}

function defaultsOf(panel) {
  const given = panel.fieldConfig?.defaults ?? {};
  return {
    ...given,
    color: given.color ?? { mode: COLORED_BY_SERIES.has(panel.type) ? 'palette-classic' : 'thresholds' },
    thresholds: thresholds(given.thresholds ?? THRESHOLDS),
    custom: { ...CUSTOM[panel.type], ...given.custom },
  };
}

function overridesOf(panel) {
  const read = (one) => (one.id === 'thresholds' ? { ...one, value: thresholds(one.value) } : one);
  return (panel.fieldConfig?.overrides ?? []).map((rule) => ({ ...rule, properties: rule.properties.map(read) }));
}

/** Frames after the panel's transformations, each field with its display processor. */
export async function configured(panel, frames, theme, timeZone) {
  const fieldConfig = { defaults: defaultsOf(panel), overrides: overridesOf(panel) };
  const apply = (data) => applyFieldOverrides({
    data, fieldConfig, fieldConfigRegistry: registryOf(fieldConfig), replaceVariables: (text) => text, theme, timeZone,
  });
  const unknown = (panel.transformations ?? []).find(({ id }) => !standardTransformersRegistry.getIfExists(id));
  if (unknown) {
    throw new Error(`Unknown transformation ${unknown.id}.`);
  }
  // Before and after: some transformations go by display names, and their results want their own configuration.
  const transformed = panel.transformations?.length && frames.length
    ? await firstValueFrom(transformDataFrame(panel.transformations, apply(frames)))
    : frames;
  return { fieldConfig, frames: apply(transformed) };
}

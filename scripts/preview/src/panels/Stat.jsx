import { getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation } from '@grafana/data';
import { BigValue, BigValueColorMode, BigValueGraphMode, BigValueTextMode, useTheme2, VizRepeater } from '@grafana/ui';

export const reduced = ({ panel, frames, fieldConfig, theme, timeZone, sparkline = false }) => getFieldDisplayValues({
  data: frames, fieldConfig, theme, timeZone, sparkline, replaceVariables: (text) => text,
  reduceOptions: { calcs: ['lastNotNull'], values: false, fields: '', ...panel.options?.reduceOptions },
});

export function Stat({ panel, frames, fieldConfig, width, height, timeZone }) {
  const theme = useTheme2();
  const options = panel.options ?? {};
  const graphMode = options.graphMode ?? BigValueGraphMode.Area;
  const getValues = () => reduced({
    panel, frames, fieldConfig, theme, timeZone, sparkline: graphMode !== BigValueGraphMode.None,
  });
  return (
    <VizRepeater source={frames} renderCounter={0} width={width} height={height} getValues={getValues} autoGrid
      orientation={options.orientation ?? VizOrientation.Auto}
      getAlignmentFactors={(values) => getDisplayValueAlignmentFactors(values)}
      renderValue={({ value, width: w, height: h, alignmentFactors, count }) => (
        <div data-value={[value.display.prefix, value.display.text, value.display.suffix].join('')}>
          <BigValue theme={theme} value={value.display} sparkline={value.sparkline} width={w} height={h} count={count}
            colorMode={options.colorMode ?? BigValueColorMode.Value} graphMode={graphMode}
            justifyMode={options.justifyMode} textMode={options.textMode ?? BigValueTextMode.Auto}
            alignmentFactors={alignmentFactors} text={options.text} disableWideLayout={!options.wideLayout} />
        </div>
      )} />
  );
}

import { getDisplayValueAlignmentFactors, VizOrientation } from '@grafana/data';
import { BarGauge, BarGaugeDisplayMode, useTheme2, VizRepeater } from '@grafana/ui';

import { reduced } from './Stat.jsx';

export function BarGauges({ panel, frames, fieldConfig, width, height, timeZone }) {
  const theme = useTheme2();
  const options = panel.options ?? {};
  return (
    <VizRepeater source={frames} renderCounter={0} width={width} height={height} itemSpacing={10}
      getValues={() => reduced({ panel, frames, fieldConfig, theme, timeZone })}
      minVizWidth={options.minVizWidth ?? 8} minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={options.maxVizHeight ?? 300} orientation={options.orientation ?? VizOrientation.Auto}
      getAlignmentFactors={(values) => getDisplayValueAlignmentFactors(values)}
      renderValue={({ value, width: w, height: h, alignmentFactors, orientation }) => (
        <BarGauge theme={theme} value={value.display} field={value.field} width={w} height={h}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)} text={options.text}
          displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient} orientation={orientation}
          alignmentFactors={alignmentFactors} showUnfilled={options.showUnfilled ?? true}
          valueDisplayMode={options.valueMode} namePlacement={options.namePlacement} />
      )} />
  );
}

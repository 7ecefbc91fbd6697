import { Table } from '@grafana/ui';

export function TableOf({ panel, frames, width, height }) {
  const options = panel.options ?? {};
  return <Table data={frames[options.frameIndex ?? 0]} width={width} height={height} columnMinWidth={100}
    noHeader={options.showHeader === false} initialSortBy={options.sortBy} cellHeight={options.cellHeight} />;
}

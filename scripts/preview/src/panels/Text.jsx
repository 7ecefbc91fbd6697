import { renderMarkdown } from '@grafana/data';

export function Text({ panel, height }) {
  const { mode = 'markdown', content = '' } = panel.options ?? {};
  const html = mode === 'markdown' ? renderMarkdown(content) : content;
  return <div className="markdown-html" style={{ height, overflow: 'hidden' }}
    dangerouslySetInnerHTML={{ __html: html }} />;
}

import { createTheme, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { Board } from './Board.jsx';
import { configured, registerTransformations } from './fields.js';
import { frames } from './frames.js';
import { opened } from './layout.js';

const TIME_ZONE = 'utc';

async function prepared(panel, answers, theme) {
  try {
    const told = Object.values(answers?.targets ?? {}).find(({ error }) => error);
    if (told) {
      throw new Error(told.error);
    }
    return { panel, ...(await configured(panel, frames(panel, answers), theme, TIME_ZONE)) };
  } catch (error) {
    return { panel, error: String(error.message ?? error), frames: [] };
  }
}

// Before anything measures its text: a chart leaves as much room as its labels take.
async function fonts() {
  const faces = [['Regular', '400', 'normal'], ['Medium', '500', 'normal'], ['Italic', '400', 'italic']];
  await Promise.all(faces.map(async ([file, weight, style]) => {
    const face = new FontFace('Inter', `url(/public/fonts/inter/Inter-${file}.woff2)`, { weight, style });
    document.fonts.add(await face.load());
  }));
}

async function main() {
  window.__grafana_public_path__ = '/public/';
  await initPluginTranslations('grafana-ui');
  registerTransformations();
  const drawing = await (await fetch('/drawing.json')).json();
  const theme = createTheme({ colors: { mode: drawing.theme } });
  const panels = await Promise.all(opened(drawing.board.panels).map((panel) =>
    prepared(panel, drawing.answers[panel.id], theme)));
  drawing.annotations?.forEach((one) => { one.color = theme.visualization.getColorByName(one.color); });
  document.body.style.margin = 0;
  document.body.style.background = theme.colors.background.canvas;
  await fonts();
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board drawing={drawing} panels={panels} timeZone={TIME_ZONE} />
    </ThemeContext.Provider>,
  );
}

main().catch((error) => {
  document.body.dataset.failed = String(error.stack ?? error);
});

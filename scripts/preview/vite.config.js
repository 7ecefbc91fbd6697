import { cpSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname } from 'node:path';
import { defineConfig } from 'vite';

const require = createRequire(import.meta.url);
const packageFolder = (name) => dirname(require.resolve(`${name}/package.json`));
const icons = `${packageFolder('@grafana/ui')}/dist/public/img/icons`;
const font = (name) => `${packageFolder('@fontsource/inter')}/files/inter-latin-${name}.woff2`;

// @grafana/ui asks for icons and fonts where a Grafana server has them.
const publicFiles = {
  name: 'public-files',
  apply: 'build',
  writeBundle({ dir }) {
    cpSync(icons, `${dir}/public/build/img/icons`, { recursive: true });
    cpSync(font('400-normal'), `${dir}/public/fonts/inter/Inter-Regular.woff2`);
    cpSync(font('500-normal'), `${dir}/public/fonts/inter/Inter-Medium.woff2`);
    cpSync(font('400-italic'), `${dir}/public/fonts/inter/Inter-Italic.woff2`);
  },
};

// A CommonJS package whose default export a strict importer takes for the whole module.
const SCROLLBARS = 'react-custom-scrollbars-2';
const scrollbars = {
  name: 'scrollbars',
  enforce: 'pre',
  resolveId: (id) => (id === SCROLLBARS ? '\0scrollbars' : null),
  load: (id) => {
    const file = require.resolve(SCROLLBARS, { paths: [packageFolder('@grafana/ui')] });
    return id === '\0scrollbars' ? `export { Scrollbars as default } from ${JSON.stringify(file)};` : null;
  },
};

export default defineConfig({
  plugins: [publicFiles, scrollbars],
  publicDir: false,
  logLevel: 'error',
  build: {
    chunkSizeWarningLimit: 20000, minify: false, reportCompressedSize: false, target: 'es2022',
    // Editors and maps, which @grafana/ui loads when they are asked for: nobody asks here.
    rolldownOptions: { external: [/monaco-editor/, /^ol\//], onLog: () => {} },
  },
  define: { 'process.env.NODE_ENV': '"production"' },
});

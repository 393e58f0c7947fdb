// Draws the committed dashboard with Grafana's own components: panel frames, time series, single figures, legends.
// What it is given in window.DRAWING: the dashboard, and for each panel's id the lines that Prometheus answered.

import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import * as ui from '@grafana/ui';
import { createDataFrame, createTheme, FieldType, getDisplayProcessor, ThemeContext } from '@grafana/data';

type Line = { legend: string; metric: Record<string, string>; values: [number, string][] };
type Panel = { id: number; title: string; description: string; type: string; gridPos: any; fieldConfig: any; options: any };

const { dashboard, lines, from, to, width } = (window as any).DRAWING;
const { BigValue, GlobalStyles, PanelChrome, TimeSeries } = ui as any;
const theme = createTheme({ colors: { mode: 'dark' } });

// Grafana's grid: 24 columns, rows of 30 pixels with 8 between them
const COLUMN = width / 24;
const ROW = 38;
const GAP = 8;

const LINE = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  pointSize: 5,
  spanNulls: false,
  axisPlacement: 'auto',
  scaleDistribution: { type: 'linear' },
  hideFrom: { legend: false, tooltip: false, viz: false },
};
const timeRange: any = { from: { valueOf: () => from }, to: { valueOf: () => to }, raw: { from: 'now-1h', to: 'now' } };

function named(line: Line, panel: Panel): string {
  return line.legend === '__auto' ? panel.title : line.legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => line.metric[label] ?? '');
}

// The one override that the dashboard has.
function hidesZeros(panel: Panel): boolean {
  return (panel.fieldConfig.overrides ?? []).some((one: any) => one.matcher.options?.reducer === 'allIsZero');
}

// A line of Prometheus as a frame of Grafana; what is not a number is a gap, as in Grafana.
function frame(line: Line, panel: Panel, index: number): any {
  const name = named(line, panel);
  const defaults = panel.fieldConfig.defaults;
  const values = line.values.map(([, value]) => (Number.isFinite(+value) ? +value : null));
  const found = values.filter((value) => value !== null) as number[];
  const hidden = found.every((value) => value === 0) && hidesZeros(panel);
  const [least, most] = [Math.min(0, ...found), Math.max(...found)];
  const config = {
    ...defaults,
    displayName: name,
    color: { mode: 'palette-classic' },
    thresholds: { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }] },
    custom: { ...LINE, ...(defaults.custom ?? {}), hideFrom: { legend: hidden, tooltip: hidden, viz: hidden } },
  };
  const value: any = { name: 'Value', type: FieldType.number, values, config };
  const built: any = createDataFrame({
    refId: 'A',
    name,
    fields: [{ name: 'Time', type: FieldType.time, values: line.values.map(([at]) => at * 1000), config: { custom: LINE } }, value],
  });
  for (const field of built.fields) {
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  }
  built.fields[1].state = { seriesIndex: index, displayName: name, range: { min: least, max: most, delta: most - least } };
  return built;
}

function Empty({ panel }: { panel: Panel }) {
  const style: any = { height: '100%', display: 'grid', placeItems: 'center', color: theme.colors.text.secondary };
  return <div style={style}>{panel.fieldConfig.defaults.noValue}</div>;
}

function Figure({ panel, frames, size }: { panel: Panel; frames: any[]; size: [number, number] }) {
  const [time, value] = frames[0].fields;
  const last = [...value.values].reverse().find((one) => one !== null);
  return (
    <BigValue
      width={size[0]}
      height={size[1]}
      value={{ ...value.display(last), title: undefined }}
      theme={theme}
      colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode}
      justifyMode={panel.options.justifyMode}
      textMode="value"
      sparkline={{ x: time, y: { ...value, config: { ...value.config, custom: {} } } }}
    />
  );
}

function Content({ panel, size }: { panel: Panel; size: [number, number] }) {
  const frames = (lines[panel.id] as Line[])
    .filter((line) => line.values.some(([, value]) => Number.isFinite(+value)))
    .map((line, index) => frame(line, panel, index));
  if (frames.length === 0) {
    return <Empty panel={panel} />;
  }
  if (panel.type === 'stat') {
    return <Figure panel={panel} frames={frames} size={size} />;
  }
  const { legend } = panel.options;
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      width={size[0]}
      height={size[1]}
      timeRange={timeRange}
      timeZone="utc"
      legend={{ ...legend, calcs: legend.calcs ?? [] }}
      options={panel.options}
      replaceVariables={(text: string) => text}
    />
  );
}

function Placed({ panel }: { panel: Panel }) {
  const { x, y, w, h } = panel.gridPos;
  const size = { width: w * COLUMN - GAP, height: h * ROW - GAP };
  const style: any = { position: 'absolute', left: x * COLUMN + GAP / 2, top: y * ROW + GAP / 2, ...size };
  if (panel.type === 'row') {
    return <div style={{ ...style, color: theme.colors.text.primary, fontWeight: 500, lineHeight: `${size.height}px` }}>▾ {panel.title}</div>;
  }
  return (
    <div style={style}>
      <PanelChrome title={panel.title} description={panel.description} {...size}>
        {(width: number, height: number) => <Content panel={panel} size={[width, height]} />}
      </PanelChrome>
    </div>
  );
}

function Board() {
  const height = Math.max(...dashboard.panels.map((panel: Panel) => panel.gridPos.y + panel.gridPos.h)) * ROW;
  const { canvas } = theme.colors.background;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ background: canvas, width, padding: GAP, fontFamily: theme.typography.fontFamily }}>
        <div style={{ color: theme.colors.text.primary, fontSize: 18, padding: GAP }}>{dashboard.title}</div>
        <div style={{ position: 'relative', height }}>
          {dashboard.panels.map((panel: Panel) => (
            <Placed key={panel.id} panel={panel} />
          ))}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')!).render(<Board />);

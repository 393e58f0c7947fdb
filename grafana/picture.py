"""Draws `overview.png`: the committed dashboard, with Grafana's own components, over what a real Prometheus scraped.

    python grafana/picture.py [--seconds 240] [--sessions FILE] [--work FOLDER]

The load is that of `replay.py`. Needs Prometheus, Node with npm, and Chromium. A Grafana server is not needed: the panels
are drawn by the packages that Grafana's own pages are made of (@grafana/ui and @grafana/data), fetched once into FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import replay

HERE = Path(__file__).parent
DASHBOARD = HERE / "dashboards" / "overview.json"
SHOWN = ("Savings", "Context pressure", "Compaction quality", "Latency and overhead")
"""The rows in the picture: all seven would not be readable in a README."""
WIDTH = 1400
NEEDED = ("prometheus", "npm", "node", "chromium")
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
"""A browser that asks nobody anything."""


def selected(board: dict[str, Any]) -> dict[str, Any]:
    """The dashboard with the rows that are shown. Rows stand in order, so what is left needs no moving."""
    panels, row = [], ""
    for panel in board["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        if row in SHOWN:
            panels.append(panel)
    return {**board, "panels": panels}


async def drawing(board: dict[str, Any], seconds: float, sessions: Path | None) -> dict[str, Any]:
    """What the page is given: the dashboard and the lines of each panel."""
    with tempfile.TemporaryDirectory() as folder:
        async with replay.rig(Path(folder)) as rig:
            print(f"replaying for {seconds:.0f} seconds …")
            await rig.load(seconds, recorded=sessions)
            await asyncio.sleep(3)
            lines = await asyncio.to_thread(answered, rig, board)
    times = [at for panel in lines.values() for line in panel for at, _ in line["values"]]
    return {"dashboard": board, "lines": lines, "from": min(times) * 1000, "to": max(times) * 1000, "width": WIDTH}


def answered(rig: replay.Rig, board: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Panel id → its lines."""
    return {
        panel["id"]: [
            {"legend": target["legendFormat"], "metric": line["metric"], "values": line["values"]}
            for target in panel.get("targets", [])
            for line in rig.course(target["expr"], step=2.0)
        ]
        for panel in board["panels"]
    }


def page(work: Path, given: dict[str, Any]) -> Path:
    """The bundled page, in `work`."""
    for name in ("app.tsx", "package.json"):
        shutil.copy(HERE / "picture" / name, work / name)
    if not (work / "node_modules" / "@grafana" / "ui").exists():
        print("fetching Grafana's components …")
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"], cwd=work, check=True)
    bundle = ["--bundle", "--minify", "--outfile=app.js", "--define:process.env.NODE_ENV='production'", "--log-level=error"]
    loaders = [f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "ttf", "woff", "woff2")]
    subprocess.run(["node", "node_modules/esbuild/bin/esbuild", "app.tsx", *bundle, *loaders], cwd=work, check=True)
    data = json.dumps(given).replace("</", "<\\/")
    head = '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="app.css">'
    body = f'<body style="margin:0"><div id="root"></div><script>window.DRAWING={data}</script><script src="app.js"></script>'
    (work / "page.html").write_text(head + body, encoding="utf-8")
    return work / "page.html"


def photograph(page: Path, board: dict[str, Any], picture: Path) -> None:
    """A screenshot of the whole page."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * 38 + 70
    subprocess.run(
        [
            *(
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--force-device-scale-factor=1",
                *QUIET,
            ),
            *("--allow-file-access-from-files", "--virtual-time-budget=20000", f"--window-size={WIDTH + 16},{height}"),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="how long the load lasts")
    parser.add_argument("--sessions", type=Path, help="recorded sessions: JSON lines with `messages` and `tokens`")
    parser.add_argument("--work", type=Path, default=HERE / "picture" / "build", help="where the page is built")
    parser.add_argument("--redraw", action="store_true", help="draw what the last load left in the work folder")
    parser.add_argument("--output", type=Path, default=HERE / "overview.png")
    given = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}")
    given.work.mkdir(parents=True, exist_ok=True)
    board = selected(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    kept = given.work / "drawing.json"
    if not given.redraw:
        kept.write_text(json.dumps(asyncio.run(drawing(board, given.seconds, given.sessions))), encoding="utf-8")
    drawn = {**json.loads(kept.read_text(encoding="utf-8")), "dashboard": board}
    photograph(page(given.work.resolve(), drawn), board, given.output.resolve())
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()

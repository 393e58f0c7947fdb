"""The built wheel: what is in it, how large it is, and that it works where it is installed alone. Usage: check_wheel.py DIST."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

NEEDED = (
    "proxy/py.typed",
    "proxy/tokens/o200k_base.ranks.gz",
    "proxy/tokens/cl100k_base.ranks.gz",
    "proxy/windows_table.json.gz",
)
MOST_BYTES = 4 * 1024 * 1024
LOCK = Path(__file__).parent.parent / "deploy" / "requirements" / "run.txt"


def main() -> int:
    dist = Path(sys.argv[1])
    [wheel] = dist.glob("*.whl")
    [_] = dist.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    foreign = [name for name in names if not name.startswith(("proxy/", "compaction_proxy-"))]
    if missing or foreign or wheel.stat().st_size > MOST_BYTES:
        print(f"wheel: missing {missing}, foreign {foreign}, {wheel.stat().st_size} bytes")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--require-hashes", "-r", str(LOCK)], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
        command = str(Path(folder) / "bin" / "compaction-proxy")
        body = b'{"model":"gpt-4o","messages":[{"role":"user","content":"hello world"}]}'
        counted = subprocess.run([command, "count", "-", "--json"], input=body, capture_output=True, check=True, cwd=folder)
        if b'"tokens": 9' not in counted.stdout:
            print(f"the installed wheel counts wrongly: {counted.stdout!r}")
            return 1
    print(
        f"wheel: {wheel.name}, {wheel.stat().st_size // 1024} KB, {len(names)} files, counts offline where it is installed alone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# `make run` as a user types it: the banner, the admin port, a request, and an end that leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp)
setsid make run ARGS="--port 0 --admin-port 0 --upstream http://127.0.0.1:9/v1" >"$out" 2>&1 &
group=$!
stop() { kill -TERM -- "-$group" 2>/dev/null || true; wait "$group" 2>/dev/null || true; }
trap stop EXIT
for _ in $(seq 300); do
  grep -q 'metrics ' "$out" && break
  kill -0 "$group" 2>/dev/null || { cat "$out"; echo "make run ended before it served"; exit 1; }
  sleep 0.2
done
cat "$out"
admin=$(sed -n 's#^ *metrics *\(http[^ ]*\)/metrics.*#\1#p' "$out")
base=$(sed -n 's#^ *base_url *\(http[^ ]*\).*#\1#p' "$out")
fetch() { .venv/bin/python - "$@" <<'PY'
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode() if len(sys.argv) > 2 else None)
try:
    print(urllib.request.urlopen(request, timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
PY
}
fetch "$admin/healthz" | grep -q '"ok"'
fetch "$admin/readyz" | grep -q '"tokenizer":"exact"'
fetch "$base/chat/completions" '{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}' | grep -q '^502 .*upstream_unreachable'
echo "make run serves"

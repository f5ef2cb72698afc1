#!/usr/bin/env bash
# Serves a model for as long as a command runs: bash examples/while_serving.sh MODEL COMMAND [ARGUMENT ...]
# MODEL is a folder or a Hub id. MAESTRALE_PORT (8000) and the other variables of docs/serving.md set up the server.
set -euo pipefail
model=$1 port=${MAESTRALE_PORT:-8000}
shift
if .venv/bin/python -c "import socket; socket.create_connection(('127.0.0.1', $port), 5)" 2>/dev/null; then
    echo "error: another program listens on port $port, and would answer in this model's place: set MAESTRALE_PORT" >&2
    exit 2
fi
.venv/bin/python -m serve --model "$model" --no-access-log &
server=$!
trap 'kill $server 2>/dev/null && wait $server || true' EXIT
ready="http://127.0.0.1:$port/ready"
until .venv/bin/python -c "import urllib.request; urllib.request.urlopen('$ready', timeout=10)" 2>/dev/null; do
    kill -0 $server # where it has ended, its error stands above
    sleep 1
done
"$@"

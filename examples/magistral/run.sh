#!/usr/bin/env bash
# Magistral's way as one command: curate, evaluate, train (`python -m trainer` starts all ranks),
# evaluate again, compare. Begun again after an interruption, each part goes on where it was.
#     bash examples/magistral/run.sh [--section.key=value ...]
set -euo pipefail
model=${MODEL:-Qwen/Qwen3-0.6B}
export MAESTRALE_EVALUATE_MAX_TOKENS=${MAESTRALE_EVALUATE_MAX_TOKENS:-3072}
export MAESTRALE_EVALUATE_SAMPLES=${MAESTRALE_EVALUATE_SAMPLES:-4}

evaluate() { # MODEL FOLDER
    bash examples/while_serving.sh "$1" .venv/bin/python -m evaluation gsm8k --out "$2"
}

mkdir -p data/magistral
[ -f data/gsm8k_train.jsonl ] || .venv/bin/python -m evaluation.download gsm8k_train gsm8k
.venv/bin/python -m curate format data/gsm8k_train.jsonl --out data/magistral/checkable.jsonl
.venv/bin/python -m curate duplicates data/magistral/checkable.jsonl --against data/gsm8k_test.jsonl \
    --out data/magistral/train.jsonl
evaluate "$model" runs/evaluations/magistral-before
.venv/bin/python -m trainer examples/magistral/settings.toml --model.path="$model" "$@"
evaluate runs/magistral/latest runs/evaluations/magistral-after
.venv/bin/python -m evaluation --compare runs/evaluations/magistral-before runs/evaluations/magistral-after \
    --out runs/evaluations/magistral

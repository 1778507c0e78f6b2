#!/bin/sh
# A picture that one vLLM worker has encoded is encoded by no other one: each is asked about it in turn.
#
#   sh pictures.sh MODEL PICTURE.png http://127.0.0.1:8001 http://127.0.0.1:8002
#
# Two workers:        kvpool vllm -- serve MODEL --port 8001      and the same with --port 8002
# An encoder apart:   kvpool vllm -- serve MODEL --port 8001 --ec-transfer-config.ec_role=ec_producer
#   and who answers:  kvpool vllm -- serve MODEL --port 8002 --ec-transfer-config.ec_role=ec_consumer
# The encoder computes no answer: whoever waits for its reply has the picture in the pool, or on its way there.
set -eu
[ $# -ge 3 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
model=$1 picture=$2
shift 2

outputs() { # URL SOURCE: how many outputs of its encoder this worker has had from there
  curl --silent --fail --max-time 10 "$1/metrics" |
    awk -v source="source=\"$2\"" '/^kvpool_encoder_outputs_total/ && index($0, source) { sum += $NF } END { print sum + 0 }'
}

for url in "$@"; do
  # The salt keeps the blocks of the prompts apart; else a worker that has them does not need the picture at all.
  reply=$({
    printf '{"model": "%s", "max_tokens": 16, "temperature": 0, "cache_salt": "%s", "messages": [{"role": "user", ' "$model" "${url##*/}"
    printf '"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,'
    base64 <"$picture" | tr -d '\n'
    printf '"}}, {"type": "text", "text": "What does this picture show?"}]}]}'
  } | curl --silent --show-error --fail-with-body --max-time 600 -H 'content-type: application/json' \
    --data-binary @- "$url/v1/chat/completions") || { echo "$reply" >&2; exit 1; }
  sleep 1 # until it is stored, and counted
  echo "$url: $(outputs "$url" computed) computed, $(outputs "$url" pool) from the pool"
done

#!/bin/sh
# The HTTP door of an index (kvpool index --http), by curl alone: who holds a prompt, and where to send it.
#
#   sh curl.sh http://127.0.0.1:50053 MODEL                        # who holds the prompt: at first nobody
#   sh curl.sh http://127.0.0.1:50053 MODEL http://127.0.0.1:8000  # a worker computes it before: its blocks are in the answer
#
# The answers are LookupResponse and RouteResponse of docs/reference/protocol.md in protobuf's JSON: columns, a row a rank.
# An index with --tokens needs a token with the right read: KVPOOL_INDEX_TOKEN.
set -eu
[ $# = 2 ] || [ $# = 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
door=$1 model=$2

ask() { # PATH JSON: the answer; ends the script with what the index said when it refuses
  curl --silent --show-error --fail-with-body --max-time 10 -H 'content-type: application/json' \
    ${KVPOOL_INDEX_TOKEN:+-H "authorization: Bearer $KVPOOL_INDEX_TOKEN"} -d "$2" "$door$1"
  echo
}

# Not before it is warm: it has heard of the workers that it knows.
curl --silent --fail --retry 30 --retry-delay 1 --max-time 60 --output /dev/null "$door/health"
echo "the index serves"

# A prompt of 1,040 tokens, 100 to 179 thirteen times: eight blocks of 128, or 65 of 16.
times=$(seq 13)
if [ $# = 3 ]; then
  prompt=$(for _ in $times; do seq 100 179; done | paste -sd, -)
  curl --silent --show-error --fail-with-body --output /dev/null -H 'content-type: application/json' \
    -d "{\"model\": \"$model\", \"prompt\": [$prompt], \"max_tokens\": 1}" "$3/v1/completions"
  sleep 1 # until the index has heard of it
fi

# Little-endian, 4 bytes each, in base64.
each=$(printf '\\%03o\\0\\0\\0' $(seq 100 179))
tokens=$(for _ in $times; do printf "$each"; done | base64 | tr -d '\n')
prompt="\"scope\": {\"model\": \"$model\"}, \"token_ids\": \"$tokens\""
ask /v1/lookup "{$prompt}"
ask /v1/route "{$prompt, \"most\": 1}"

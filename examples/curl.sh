#!/bin/sh
# The HTTP door of an index (kvpool index --http), by curl alone: who holds a prompt, and where to send it.
#
#   sh curl.sh http://127.0.0.1:50053 MODEL
#
# The answers are LookupResponse and RouteResponse of docs/reference/protocol.md in protobuf's JSON: columns, a row a rank.
# An index with --tokens needs a token with the right read: KVPOOL_INDEX_TOKEN.
set -eu
[ $# = 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
door=$1 model=$2

ask() { # PATH JSON: the answer; ends the script with what the index said when it refuses
  curl --silent --show-error --fail-with-body --max-time 10 -H 'content-type: application/json' \
    ${KVPOOL_INDEX_TOKEN:+-H "authorization: Bearer $KVPOOL_INDEX_TOKEN"} -d "$2" "$door$1"
  echo
}

# Not before it is warm: it has heard of the workers that it knows.
curl --silent --fail --retry 30 --retry-delay 1 --max-time 60 --output /dev/null "$door/health"
echo "the index serves"

# A prompt of 80 tokens, 100 to 179: little-endian, 4 bytes each, in base64.
tokens=$(for token in $(seq 100 179); do printf "\\$(printf %03o "$token")\\0\\0\\0"; done | base64 | tr -d '\n')
prompt="\"scope\": {\"model\": \"$model\"}, \"token_ids\": \"$tokens\""
ask /v1/lookup "{$prompt}"
ask /v1/route "{$prompt, \"most\": 1}"

#!/bin/sh
# The HTTP door of an index (kvpool index --http), by curl alone: name a worker, ask about a prompt, forget the worker.
#
#   sh curl.sh http://127.0.0.1:50053 MODEL tcp://WORKER:5557 tcp://WORKER:5657
#
# The two addresses are the worker's KV events and their replays; its blocks have 16 tokens. An index with --tokens needs
# a token with the rights read, publish and admin: KVPOOL_INDEX_TOKEN. docs/reference/protocol.md, "RFC 1403 over HTTP".
set -eu
[ $# = 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
door=$1 model=$2 events=$3 replay=$4

ask() { # PATH JSON: the answer; ends the script with what the index said when it refuses
  curl --silent --show-error --fail-with-body --max-time 10 -H 'content-type: application/json' \
    ${KVPOOL_INDEX_TOKEN:+-H "authorization: Bearer $KVPOOL_INDEX_TOKEN"} -d "$2" "$door$1"
  echo
}

# Not before it is warm: it has heard of the workers that it knows.
curl --silent --fail --retry 30 --retry-delay 1 --max-time 60 --output /dev/null "$door/health"
echo "the index serves"

ask /register "{\"modelname\": \"$model\", \"instance_id\": \"curl-1\", \"endpoint\": \"$events\",
  \"replay_endpoint\": \"$replay\", \"block_size\": 16, \"type\": \"vLLM\"}"

# A prompt of 80 tokens, 100 to 179: 5 blocks. Counts in the answer are tokens. It takes a moment to hear what a worker holds.
tokens=$(seq -s, 100 179)
for _ in 1 2 3 4 5 6 7 8 9 10; do
  answer=$(ask /query "{\"model\": \"$model\", \"token_ids\": [$tokens], \"block_size\": 16}")
  case $answer in *'"GPU":0'*) sleep 0.5 ;; *) break ;; esac
done
echo "$answer"

ask /unregister '{"instance_id": "curl-1"}'

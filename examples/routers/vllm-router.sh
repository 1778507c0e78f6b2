# vLLM's router follows the workers' KV events: start them with --kv-events-config. 0.1.17.
vllm-router --host 0.0.0.0 --port 8080 --policy kv_aware --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 \
  --kv-event-source http://10.0.0.1:8000=tcp://10.0.0.1:5557 --kv-event-replay-source http://10.0.0.1:8000=tcp://10.0.0.1:5657 \
  --kv-event-source http://10.0.0.2:8000=tcp://10.0.0.2:5557 --kv-event-replay-source http://10.0.0.2:8000=tcp://10.0.0.2:5657 \
  --kv-event-model MODEL --kv-event-block-size 16

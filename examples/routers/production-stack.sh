# vLLM production-stack, by its documentation: not run.
vllm-router --port 8080 --service-discovery static --static-backends http://10.0.0.1:8000,http://10.0.0.2:8000 --static-models MODEL,MODEL \
  --routing-logic session --session-key x-session-id

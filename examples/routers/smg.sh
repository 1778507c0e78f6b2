# SGLang's router, formerly sglang-router, in front of vLLM's workers. 1.13.0.
smg launch --host 0.0.0.0 --port 8080 --policy cache_aware --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000

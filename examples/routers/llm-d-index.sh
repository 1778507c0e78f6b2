# The index in place of llm-d's endpoint picker, for the cluster of llm-d-cluster.yaml.
kvpool index --listen 0.0.0.0:50051 --pool valkey://valkey:6379 --ext-proc 0.0.0.0:9002 --place-timeout 1 --place-endpoints 1

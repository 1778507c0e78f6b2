# deploy/envoy.yaml names two workers and two indexes; here are the headless Services, whose names stand for all ready pods.
s/address: worker-1, port_value: 8000/address: worker, port_value: 8000/
/address: worker-2, port_value: 8000/d
s/address: index-1, port_value: 50052/address: index-pods, port_value: 50052/
/address: index-2, port_value: 50052/d

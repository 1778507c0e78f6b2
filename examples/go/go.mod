module kvpool.example/lookup

go 1.23

require (
	google.golang.org/grpc v1.64.0
	google.golang.org/protobuf v1.36.5
)

// Which worker holds how much of a prompt? From Go, as docs/reference/protocol.md says.
//
//	go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.5
//	go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0
//	go generate && go mod tidy && go run . 127.0.0.1:50051 MODEL 16 TOKEN TOKEN TOKEN...
//
// 16: tokens of a block, as the workers of MODEL have them. The hashes are made here (hash.go); an index makes them of
// token_ids, too, and then knows the size of the blocks by itself.
package main

//go:generate protoc --proto_path=../../protos --go_out=. --go-grpc_out=. --go_opt=module=kvpool.example/lookup --go-grpc_opt=module=kvpool.example/lookup --go_opt=Mkvpool/v1/index.proto=kvpool.example/lookup/kvpoolv1 --go-grpc_opt=Mkvpool/v1/index.proto=kvpool.example/lookup/kvpoolv1 kvpool/v1/index.proto

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "kvpool.example/lookup/kvpoolv1"
)

func main() {
	if len(os.Args) < 5 {
		fmt.Fprintln(os.Stderr, "usage: lookup HOST:PORT MODEL BLOCK_TOKENS TOKEN...")
		os.Exit(2)
	}
	if err := lookup(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, "lookup:", err)
		os.Exit(1)
	}
}

func lookup(target, model, blockTokens string, words []string) error {
	size, err := strconv.Atoi(blockTokens)
	if err != nil || size < 1 {
		return fmt.Errorf("%q is no number of tokens", blockTokens)
	}
	tokens := make([]uint32, len(words))
	for i, word := range words {
		token, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return fmt.Errorf("%q is no token", word)
		}
		tokens[i] = uint32(token)
	}
	// With TLS and a token: credentials.NewTLS, and the metadata "authorization: Bearer TOKEN" with each call.
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	// Without an answer in time a router places the request as if nothing were known.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	rows, err := pb.NewIndexServiceClient(connection).Lookup(ctx, &pb.LookupRequest{
		Scope:  &pb.Scope{Model: model},
		Prompt: &pb.LookupRequest_BlockHashes{BlockHashes: BlockHashes(tokens, size, "")},
	})
	if err != nil {
		return err
	}
	// The reply is a table in columns: row i has element i of each.
	for i, worker := range rows.Worker {
		fmt.Printf("%s at %s: %d of %d blocks in its memory, %d in the pool, stale: %t\n", worker, rows.Address[i],
			rows.DeviceBlocks[i], rows.PromptBlocks[i], rows.PoolBlocks[i], rows.Stale[i])
	}
	return nil
}

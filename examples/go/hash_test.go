package main

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
)

// The golden vectors of the protocol; GOLDEN names the file elsewhere than in a checkout.
func TestHashesAreThoseOfTheGoldenVectors(t *testing.T) {
	path := os.Getenv("GOLDEN")
	if path == "" {
		path = "../../tests/golden/protocol.json"
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Kind, Name, Algorithm string
		Seed, Lora            any
		CacheSalt             any      `json:"cache_salt"`
		Multimodal            []any    `json:"multimodal"`
		TokenIDs              []uint32 `json:"token_ids"`
		BlockTokens           int      `json:"block_tokens"`
		BlockHashes           string   `json:"block_hashes"`
	}
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, one := range vectors {
		plain := one.Lora == nil && one.CacheSalt == nil && len(one.Multimodal) == 0
		if one.Kind != "prompt" || one.Algorithm != "sha256_cbor" || !plain {
			continue
		}
		seed, _ := one.Seed.(string)
		if made := hex.EncodeToString(BlockHashes(one.TokenIDs, one.BlockTokens, seed)); made != one.BlockHashes {
			t.Errorf("%s: %s, not %s", one.Name, made, one.BlockHashes)
		}
		compared++
	}
	if compared < 2 {
		t.Fatalf("%d vectors", compared)
	}
}

package main

import (
	"crypto/sha256"
	"encoding/binary"
)

// BlockHashes makes the field block_hashes: for each full block of a prompt the 64-bit form of its hash, 8 bytes in little
// endian. As vLLM hashes with sha256_cbor; seed is PYTHONHASHSEED of the workers, "" where it is not set.
func BlockHashes(tokens []uint32, blockTokens int, seed string) []byte {
	if seed == "" {
		seed = "vllm-none-hash"
	}
	before := sha256.Sum256(cborHead(nil, 3, uint64(len(seed)), seed))
	var packed []byte
	for ; len(tokens) >= blockTokens; tokens = tokens[blockTokens:] {
		// [hash of the block before, [tokens], extra keys: null]
		message := cborHead(nil, 4, 3, "")
		message = cborHead(message, 2, uint64(len(before)), string(before[:]))
		message = cborHead(message, 4, uint64(blockTokens), "")
		for _, token := range tokens[:blockTokens] {
			message = cborHead(message, 0, uint64(token), "")
		}
		before = sha256.Sum256(append(message, 0xf6))
		// The last 8 bytes, read big-endian, written little-endian.
		packed = binary.LittleEndian.AppendUint64(packed, binary.BigEndian.Uint64(before[24:]))
	}
	return packed
}

// cborHead appends an item of a major type (0: number, 2: bytes, 3: text, 4: list) with the shortest form of its number or
// length, and its content.
func cborHead(to []byte, major byte, number uint64, content string) []byte {
	switch {
	case number < 24:
		to = append(to, major<<5|byte(number))
	case number <= 0xff:
		to = append(to, major<<5|24, byte(number))
	case number <= 0xffff:
		to = binary.BigEndian.AppendUint16(append(to, major<<5|25), uint16(number))
	case number <= 0xffffffff:
		to = binary.BigEndian.AppendUint32(append(to, major<<5|26), uint32(number))
	default:
		to = binary.BigEndian.AppendUint64(append(to, major<<5|27), number)
	}
	return append(to, content...)
}

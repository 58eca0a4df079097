package catalog

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
)

// A record is a CRC-32C of its key and its JSON, in four bytes, and then the JSON.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const sumBytes = 4

func sum(key, text []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, text)
}

func put(b *bbolt.Bucket, key []byte, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return b.Put(key, append(binary.BigEndian.AppendUint32(nil, sum(key, text)), text...))
}

// decode is ErrDataLoss for a record that is not what was written, and ErrFailedPrecondition for one with fields of a
// newer version, which would be lost if it were written back.
func decode(key, raw []byte, v any) error {
	if len(raw) < sumBytes || binary.BigEndian.Uint32(raw) != sum(key, raw[sumBytes:]) {
		return fmt.Errorf("record %.64q is damaged: %w", key, errdefs.ErrDataLoss)
	}
	d := json.NewDecoder(bytes.NewReader(raw[sumBytes:]))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("record %.64q was written by another version: %w: %w", key, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

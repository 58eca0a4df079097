package catalog

import "encoding/binary"

// Sealed is a record of this text, as put stores it.
func Sealed(key, text []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, sum(key, text)), text...)
}

package runtimehandler

import (
	"crypto/sha256"
	"encoding/hex"
)

// serialBytes is the size of a virtio-blk serial (VIRTIO_BLK_ID_BYTES of the virtio specification, section 5.2).
const serialBytes = 20

// Serial returns the virtio serial of a published volume: 20 hexadecimal digits of a digest of driver and volume id. It
// is the same for every sandbox, so that a guest can tell its volumes apart whatever the order of its devices.
func Serial(driver, volumeID string) string {
	sum := sha256.Sum256([]byte(driver + "\x00" + volumeID))
	return hex.EncodeToString(sum[:serialBytes/2])
}

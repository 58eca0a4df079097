package deferred

import (
	"context"

	"google.golang.org/grpc/metadata"
)

// metadataKey is the gRPC metadata by which a caller of NodeGetCapabilities says that it knows this extension, and its
// value then. Capabilities are an enumeration: to a CO that does not know the extension their numbers are invalid, and
// csi-sanity for one refuses a driver that shows them.
const (
	metadataKey   = "crust-csi-extension"
	metadataValue = "deferred"
)

// Ask returns a context under which a call of NodeGetCapabilities asks for the capabilities of this package, too. An SP that
// declares them to everybody need not look.
func Ask(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, metadataKey, metadataValue)
}

// Asked reports whether the caller, in the context of whose call this is, has asked for the capabilities of this package.
func Asked(ctx context.Context) bool {
	for _, value := range metadata.ValueFromIncomingContext(ctx, metadataKey) {
		if value == metadataValue {
			return true
		}
	}
	return false
}

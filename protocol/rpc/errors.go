package rpc

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// kinds pairs the error kinds with the codes that stand for them on the wire. The first entry of a code is what the
// code becomes on the way back.
var kinds = []struct {
	kind error
	code codes.Code
}{
	{errdefs.ErrInvalidArgument, codes.InvalidArgument},
	{errdefs.ErrNotFound, codes.NotFound},
	{errdefs.ErrAlreadyExists, codes.AlreadyExists},
	{errdefs.ErrPermissionDenied, codes.PermissionDenied},
	{errdefs.ErrResourceExhausted, codes.ResourceExhausted},
	{errdefs.ErrFailedPrecondition, codes.FailedPrecondition},
	{errdefs.ErrAborted, codes.Aborted},
	{errdefs.ErrOutOfRange, codes.OutOfRange},
	{errdefs.ErrNotImplemented, codes.Unimplemented},
	{errdefs.ErrUnavailable, codes.Unavailable},
	{errdefs.ErrDataLoss, codes.DataLoss},
	{errdefs.ErrUnauthenticated, codes.Unauthenticated},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
	{errdefs.ErrInternal, codes.Internal},
}

// Code returns the status code for an error: that of the first kind found in its tree, OK for nil, and Internal for an
// error without a kind. In particular a bare [os.ErrNotExist] is Internal and not NotFound, because CSI callers read
// NotFound as "already gone".
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	var relayed *relayedError
	if errors.As(err, &relayed) {
		return relayed.status.Code()
	}
	if notImplemented(err) {
		return codes.Unimplemented
	}
	kind := errdefs.Resolve(err)
	for _, k := range kinds {
		if k.kind == kind {
			return k.code
		}
	}
	return codes.Internal
}

// notImplemented recognises the answer of the generated servers that are embedded for the methods that a service lacks:
// the only status that comes from a handler.
func notImplemented(err error) bool {
	st, ok := err.(interface{ GRPCStatus() *status.Status })
	return ok && st.GRPCStatus().Code() == codes.Unimplemented
}

// toWire turns an error into the status that a peer gets to see.
func toWire(err error) error {
	if err == nil {
		return nil
	}
	var relayed *relayedError
	if errors.As(err, &relayed) {
		return relayed.status.Err()
	}
	return status.Error(Code(err), err.Error())
}

// FromWire turns the error of a call to a peer into one of ours: it has the peer's text and wraps the kind that stands
// for the peer's code, but it no longer carries the peer's status. nil stays nil.
func FromWire(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		if errdefs.Resolve(err) != errdefs.ErrUnknown {
			return err
		}
		// The connection broke, or the peer does not speak the protocol: the caller may try again.
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	for _, k := range kinds {
		if k.code == st.Code() {
			return &remoteError{text: st.Message(), kind: k.kind}
		}
	}
	return &remoteError{text: st.Message(), kind: errdefs.ErrUnknown}
}

// remoteError is what is left of a peer's status.
type remoteError struct {
	text string
	kind error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.kind }

// Relay marks the error of a call to a peer as one that the caller of ours is to see unchanged, code, text and
// details. It is for proxies and for nothing else.
func Relay(err error) error {
	if err == nil {
		return nil
	}
	return &relayedError{status: status.Convert(err)}
}

type relayedError struct{ status *status.Status }

func (e *relayedError) Error() string { return e.status.Message() }

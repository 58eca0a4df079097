package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"

	"crust.dev/crust/protocol/rpc"
)

// frame is a message that is not decoded.
type frame struct{ data mem.BufferSlice }

// frameCodec passes frames as they are and leaves everything else to the protobuf codec, under whose name it goes.
type frameCodec struct{ encoding.CodecV2 }

func newFrameCodec() frameCodec { return frameCodec{encoding.GetCodecV2(proto.Name)} }

func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return f.data, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		data.Ref()
		f.data = data
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// passThrough returns the handler for every method that the server does not know: it opens the same method on conn and
// copies frames both ways, headers, trailers and the final status included.
func passThrough(conn grpc.ClientConnInterface) grpc.StreamHandler {
	desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	return func(_ any, down grpc.ServerStream) error {
		method, ok := grpc.MethodFromServerStream(down)
		if !ok {
			return errors.New("stream without a method")
		}
		ctx, cancel := context.WithCancel(down.Context())
		defer cancel()
		if md, ok := metadata.FromIncomingContext(ctx); ok {
			ctx = metadata.NewOutgoingContext(ctx, md)
		}
		up, err := conn.NewStream(ctx, desc, method, grpc.ForceCodecV2(newFrameCodec()))
		if err != nil {
			return rpc.Relay(err)
		}
		// The goroutine ends with the call: gRPC then fails what it receives from the CO.
		go func() {
			if err := copyRequests(up, down); err != nil {
				cancel()
			}
		}()
		return rpc.Relay(copyResponses(down, up))
	}
}

func copyRequests(up grpc.ClientStream, down grpc.ServerStream) error {
	for {
		var f frame
		err := down.RecvMsg(&f)
		if errors.Is(err, io.EOF) {
			return up.CloseSend()
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if err := up.SendMsg(&f); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
}

func copyResponses(down grpc.ServerStream, up grpc.ClientStream) error {
	header, err := up.Header()
	if err != nil {
		return err
	}
	if err := down.SetHeader(header); err != nil {
		return err
	}
	for {
		var f frame
		err := up.RecvMsg(&f)
		if err != nil {
			down.SetTrailer(up.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := down.SendMsg(&f); err != nil {
			return err
		}
	}
}

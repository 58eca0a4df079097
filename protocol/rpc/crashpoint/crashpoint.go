// Package crashpoint names the places between two durable steps, so that a test can kill the process in each of them.
//
// Code calls [At] with the context that it was given. In production the context carries nothing and At does nothing.
package crashpoint

import "context"

type key struct{}

// With returns a context under which every [At] calls f with the name of the place.
func With(ctx context.Context, f func(place string)) context.Context {
	return context.WithValue(ctx, key{}, f)
}

// Carry returns ctx with what from carries for [At], if it carries anything: for servers, whose calls do not come with
// the context under which they were started.
func Carry(ctx, from context.Context) context.Context {
	if f, ok := from.Value(key{}).(func(string)); ok {
		return With(ctx, f)
	}
	return ctx
}

// At marks a place between two durable steps. The name says what has just been done.
func At(ctx context.Context, place string) {
	if f, ok := ctx.Value(key{}).(func(string)); ok {
		f(place)
	}
}

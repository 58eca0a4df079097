// Package guestv1 is generated from guest.proto, which documents it.
package guestv1

// Package adminv1 is generated from admin.proto, which documents it.
package adminv1

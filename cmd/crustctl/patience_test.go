package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b strings.Builder
		end := tell(&b, 2*time.Second)
		time.Sleep(5 * time.Second)
		end()
		want := "\rwaiting for crustd and its sandboxes, 2s so far \rwaiting for crustd and its sandboxes, 4s so far \r\x1b[K"
		if b.String() != want {
			t.Errorf("got %q", b.String())
		}
	})
	synctest.Test(t, func(t *testing.T) {
		var b strings.Builder
		end := tell(&b, 2*time.Second)
		time.Sleep(time.Second)
		end()
		if b.String() != "" {
			t.Errorf("a quick call says %q", b.String())
		}
	})
}

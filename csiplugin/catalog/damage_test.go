package catalog_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// filled returns the bytes of a catalog with some volumes.
func filled(t testing.TB) []byte {
	t.Helper()
	c, path := newCatalog(t, t.TempDir())
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		v := volume(name)
		if err := errors.Join(c.PutVolume(v), c.PutNode(v.ID, catalog.Node{Formatting: true})); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// openBytes opens a catalog of these bytes and checks that a refused one was not touched.
func openBytes(t testing.TB, raw []byte) error {
	t.Helper()
	path := filepath.Join(t.TempDir(), "catalog.db")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := catalog.Open(path)
	if err == nil {
		_, err := c.Volumes()
		if err := errors.Join(err, c.Close()); err != nil {
			t.Errorf("it was opened and cannot be read: %v", err)
		}
		return nil
	}
	if after, readErr := os.ReadFile(path); readErr != nil || !bytes.Equal(after, raw) {
		t.Errorf("a refused catalog was changed (%v)", readErr)
	}
	return err
}

func TestADamagedCatalogIsRefusedAndLeftAlone(t *testing.T) {
	good := filled(t)
	page := os.Getpagesize()
	for name, raw := range map[string][]byte{
		"empty":                   {},
		"no catalog":              bytes.Repeat([]byte("no"), page),
		"zeros":                   make([]byte, 8*page),
		"cut off within a page":   good[:5*page+100],
		"cut off after the metas": good[:2*page],
		"both metas overwritten":  append(make([]byte, 2*page), good[2*page:]...),
		"a value changed":         bytes.ReplaceAll(good, []byte(`"ready"`), []byte(`"Ready"`)),
	} {
		t.Run(name, func(t *testing.T) {
			if err := openBytes(t, raw); !errors.Is(err, errdefs.ErrDataLoss) {
				t.Errorf("got %v, want %v", err, errdefs.ErrDataLoss)
			}
		})
	}
	if err := openBytes(t, good); err != nil {
		t.Errorf("the undamaged one: %v", err)
	}
}

func TestAMissingCatalogIsNotMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "catalog.db")
	if _, err := catalog.Open(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open has made it: %v", err)
	}
}

func TestWhatANewerVersionWroteIsRefused(t *testing.T) {
	for name, change := range map[string]func(tx *bbolt.Tx) error{
		"a newer format": func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte("meta")).Put([]byte("format"), binary.BigEndian.AppendUint32(nil, 5))
		},
		"a field of a newer version": func(tx *bbolt.Tx) error { return addField(tx) },
	} {
		t.Run(name, func(t *testing.T) {
			c, path := newCatalog(t, t.TempDir())
			if err := errors.Join(c.PutVolume(volume("a")), c.Close()); err != nil {
				t.Fatal(err)
			}
			db, err := bbolt.Open(path, 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(db.Update(change), db.Close()); err != nil {
				t.Fatal(err)
			}
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := openBytes(t, raw); !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestOldFormatsAreBroughtUpToDate takes away from a catalog what earlier versions did not have.
func TestOldFormatsAreBroughtUpToDate(t *testing.T) {
	for format, lacks := range map[uint32][]string{
		1: {"snapshots", "snapshot-names", "groups", "group-names", "images", "image-names", "bases", "base-names"},
		2: {"images", "image-names", "bases", "base-names"},
		3: {"bases", "base-names"},
	} {
		c, path := newCatalog(t, t.TempDir())
		v := volume("a")
		if err := errors.Join(c.PutVolume(v), c.Close()); err != nil {
			t.Fatal(err)
		}
		db, err := bbolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = db.Update(func(tx *bbolt.Tx) error {
			for _, name := range lacks {
				if err := tx.DeleteBucket([]byte(name)); err != nil {
					return err
				}
			}
			return tx.Bucket([]byte("meta")).Put([]byte("format"), binary.BigEndian.AppendUint32(nil, format))
		})
		if err := errors.Join(err, db.Close()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			c = reopen(t, path)
			if got, err := c.VolumeNamed("a"); err != nil || got.ID != v.ID {
				t.Errorf("format %d: got %v, %v", format, got, err)
			}
			s := catalog.Snapshot{ID: handle.NewSnapshot(pool), State: catalog.Ready, Volume: v.ID}
			id := handle.NewImage(pool)
			if err := errors.Join(c.PutSnapshot(s), c.PutImage(catalog.Image{ID: id, Name: id.String(), State: catalog.Ready}),
				c.KeepBase(catalog.Base{ID: handle.NewSnapshot(pool), Volume: v.ID}), c.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// addField adds a field to every volume, with a good checksum.
func addField(tx *bbolt.Tx) error {
	b := tx.Bucket([]byte("volumes"))
	changed := map[string][]byte{}
	err := b.ForEach(func(key, raw []byte) error {
		text := append(bytes.TrimSuffix(bytes.Clone(raw[4:]), []byte("}")), `,"later":1}`...)
		changed[string(key)] = catalog.Sealed(key, text)
		return nil
	})
	for key, raw := range changed {
		err = errors.Join(err, b.Put([]byte(key), raw))
	}
	return err
}

// TestFlippedBytes changes bytes at random. Whatever comes of it, Open does not panic or hang, and what it refuses it
// leaves alone.
func TestFlippedBytes(t *testing.T) {
	good := filled(t)
	used := bytes.LastIndexFunc(good, func(r rune) bool { return r != 0 })
	r := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for range 150 {
		raw := bytes.Clone(good)
		for range 1 + r.IntN(4) {
			raw[r.IntN(used)] ^= byte(1 + r.IntN(255))
		}
		if openBytes(t, raw) != nil {
			refused++
		}
	}
	if refused == 0 {
		t.Error("no damage was ever noticed")
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(filled(f))
	f.Add([]byte("no catalog"))
	f.Fuzz(func(t *testing.T, raw []byte) { _ = openBytes(t, raw) })
}

func TestAFullDisk(t *testing.T) {
	priv.Root(t)
	for fstype, size := range map[string]int64{"xfs": 320 << 20, "btrfs": 320 << 20} {
		t.Run(fstype, func(t *testing.T) {
			dir := scratch.Filesystem(t, fstype, size)
			c, path := newCatalog(t, dir)
			var kept []catalog.Volume
			for _, name := range []string{"a", "b", "c", "d"} {
				v := volume(name)
				if err := errors.Join(c.Reserve(), c.PutVolume(v), c.PutNode(v.ID, catalog.Node{Formatting: true})); err != nil {
					t.Fatal(err)
				}
				kept = append(kept, v)
			}
			scratch.Fill(t, filepath.Join(dir, "full"))

			// Going on until the reserve is used up ends in the right error...
			var err error
			for i := 0; err == nil && i < 100000; i++ {
				if err = c.Reserve(); err == nil {
					v := volume(fmt.Sprintf("more%d", i))
					err = c.PutVolume(v)
				}
			}
			if !errors.Is(err, errdefs.ErrResourceExhausted) {
				t.Errorf("got %v", err)
			}
			// ...and giving back still works, again and again.
			for _, v := range kept {
				v.State = catalog.Deleting
				if err := errors.Join(c.PutVolume(v), c.PutNode(v.ID, catalog.Node{}), c.RemoveVolume(v.ID)); err != nil {
					t.Errorf("with a full disk: %v", err)
				}
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			c = reopen(t, path)
			for _, v := range kept {
				if _, err := c.Volume(v.ID); !errors.Is(err, errdefs.ErrNotFound) {
					t.Errorf("after reopening: %v", err)
				}
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

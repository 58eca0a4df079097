package backing_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/csiplugin/backing"
)

var sum = strings.Repeat("bd79ab9e", 16)

const id = "0123456789ab-img-00112233445566778899aabbccddeeff"

func TestParseHandle(t *testing.T) {
	for name, row := range map[string]struct {
		text string
		want backing.Handle
	}{
		"Longhorn's example of a download": {
			"bi://backing?backingImageDataSourceType=download&backingImage=test-bi&url=https%3A%2F%2Fimages.example.com%2Fparrot.qcow2&backingImageChecksum=" + sum,
			backing.Handle{Image: "test-bi", Source: backing.Download, URL: "https://images.example.com/parrot.qcow2", Checksum: sum},
		},
		"Longhorn's example of an export": {
			"bi://backing?backingImageDataSourceType=export-from-volume&backingImage=test-bi&volume-name=vol-export-src&export-type=qcow2",
			backing.Handle{Image: "test-bi", Source: backing.Export, Volume: "vol-export-src", Format: backing.QCOW2},
		},
		"the aliases": {
			"bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume&volume-name=v&exportType=raw&checksum=" + strings.ToUpper(sum),
			backing.Handle{Image: "a", Source: backing.Export, Volume: "v", Format: backing.Raw, Checksum: sum},
		},
		"a reference": {
			"bi://backing?backingImageDataSourceType=download&backingImage=a",
			backing.Handle{Image: "a", Source: backing.Download},
		},
		"a URL that was not escaped but could do without": {
			"bi://backing?backingImageDataSourceType=download&backingImage=a&url=http://h/p?x=1",
			backing.Handle{Image: "a", Source: backing.Download, URL: "http://h/p?x=1"},
		},
		"a plus sign is a space": {
			"bi://backing?backingImageDataSourceType=download&backingImage=a+b%2B",
			backing.Handle{Image: "a b+", Source: backing.Download},
		},
		"one of this driver's snapshots": {
			"bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume&image-id=" + id,
			backing.Handle{Image: "a", Source: backing.Export, ID: id},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := backing.ParseHandle(row.text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestALongHandleIsAccepted(t *testing.T) {
	h := backing.Handle{Image: "a", Source: backing.Download, URL: "https://h/" + strings.Repeat("x", 1000) + "?" + strings.Repeat("y", 4000)}
	if got, err := backing.ParseHandle(h.String()); err != nil || got != h {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestParseHandleRefuses(t *testing.T) {
	const download, export = "bi://backing?backingImage=a&backingImageDataSourceType=download", "bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume"
	for name, row := range map[string]struct{ text, names string }{
		"nothing":                         {"", "bi://backing?"},
		"another scheme":                  {"snap://a/b", "bi://backing?"},
		"another host":                    {"bi://other?backingImage=a", "bi://backing?"},
		"no authority":                    {"bi:backing?backingImage=a", "bi://backing?"},
		"a path":                          {"bi://backing/x?backingImage=a", "bi://backing?"},
		"a port":                          {"bi://backing:1?backingImage=a", "bi://backing?"},
		"upper case":                      {"BI://backing?backingImage=a", "bi://backing?"},
		"userinfo":                        {"bi://user:pw@backing?backingImage=a", "userinfo"},
		"a fragment":                      {download + "#f", "fragment"},
		"no query":                        {"bi://backing?", `key ""`},
		"an empty pair":                   {download + "&", `key ""`},
		"a duplicate":                     {download + "&backingImage=b", "backingImage is there twice"},
		"a duplicate by an alias":         {export + "&export-type=raw&exportType=raw", "export-type is there twice"},
		"an unknown key":                  {download + "&y=2", `key "y"`},
		"a key in another case":           {download + "&URL=http://h/", `key "URL"`},
		"no value":                        {download + "&url=", "url has no value"},
		"no equals sign":                  {download + "&url", "url has no value"},
		"a value that is escaped wrongly": {download + "&url=http://h/%zz", "url is escaped wrongly"},
		"a key that is escaped wrongly":   {download + "&u%zz=1", "escaped wrongly"},
		"a semicolon":                     {download + "&url=http://h/a;b", "url has a semicolon"},
		"a control character":             {download + "&url=http://h/%0a", "url has a control character"},
		"what is not UTF-8":               {"bi://backing?backingImage=%ff&backingImageDataSourceType=download", "backingImage is escaped wrongly"},
		"no name":                         {"bi://backing?backingImageDataSourceType=download", "backingImage is missing"},
		"a long name":                     {"bi://backing?backingImageDataSourceType=download&backingImage=" + strings.Repeat("a", 129), "backingImage has 129 bytes"},
		"no source":                       {"bi://backing?backingImage=a", "backingImageDataSourceType is missing"},
		"a source that Longhorn has for other means": {"bi://backing?backingImage=a&backingImageDataSourceType=upload", "backingImageDataSourceType"},
		"a source spelt as in Longhorn's text":       {"bi://backing?backingImage=a&backingImageDataSourceType=export-form-volume", "export-from-volume"},
		"a short checksum":                           {download + "&backingImageChecksum=abc", "backingImageChecksum"},
		"a download from a volume":                   {download + "&volume-name=v", "volume-name does not go with"},
		"an export from a URL":                       {export + "&url=http://h/", "url does not go with"},
		"another format":                             {export + "&export-type=vmdk", "export-type"},
		"a file":                                     {download + "&url=file:///etc/shadow", "url has the scheme"},
		"a URL with userinfo":                        {download + "&url=" + "https%3A%2F%2Fuser%3Apw@h%2Fp", "url has userinfo"},
		"a URL with a fragment":                      {download + "&url=" + "https%3A%2F%2Fh%2Fp%23f", "url has a fragment"},
		"a URL without a host":                       {download + "&url=http%3A%2F%2F%2Fp", "url names no host"},
		"an id of another kind":                      {export + "&image-id=0123456789ab-vol-00112233445566778899aabbccddeeff", "image-id"},
		"too much to be kept":                        {download + "&url=http://h/" + strings.Repeat("x", 2000), "bytes"},
		"too much":                                   {download + "&url=http://h/" + strings.Repeat("x", backing.MaxHandle), "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := backing.ParseHandle(row.text)
			if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), row.names) {
				t.Errorf("got %v, want an error that names %q", err, row.names)
			}
			if err != nil && strings.Contains(err.Error(), "pw") {
				t.Errorf("the message shows a password: %v", err)
			}
		})
	}
}

func TestTheQueryOfAURLIsNotPublic(t *testing.T) {
	h := backing.Handle{Image: "a", Source: backing.Download, URL: "https://h/p?signature=secret"}
	public := h.Public()
	if strings.Contains(public.String(), "secret") {
		t.Errorf("got %v", public)
	}
	if public.Public() != public {
		t.Error("a public handle is not its own")
	}
	other := h
	other.URL = "https://h/p?signature=other"
	if other.Public() == public {
		t.Error("another query looks the same")
	}
	if _, err := backing.ParseHandle(public.String()); err != nil {
		t.Error(err)
	}
	if plain := (backing.Handle{Image: "a", Source: backing.Download, URL: "https://h/p"}); plain.Public() != plain {
		t.Error("a handle without a query is not public as it is")
	}
}

func TestDeclared(t *testing.T) {
	for url, want := range map[string]backing.Format{
		"https://h/a.qcow2": backing.QCOW2, "https://h/a.QCOW2?x=1": backing.QCOW2, "https://h/a.img": backing.Raw, "https://h/a?x=.qcow2": backing.Raw, "": backing.Raw,
	} {
		if got := (backing.Handle{URL: url}).Declared(); got != want {
			t.Errorf("%q: got %s, want %s", url, got, want)
		}
	}
	if got := (backing.Handle{URL: "https://h/a.qcow2", Format: backing.Raw}).Declared(); got != backing.Raw {
		t.Error("the name counts more than what was said")
	}
}

func TestPreparable(t *testing.T) {
	for text, names := range map[string]string{
		"bi://backing?backingImage=a&backingImageDataSourceType=download":                                                        "url",
		"bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume":                                              "volume-name",
		"bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume&volume-name=v":                                "export-type",
		"bi://backing?backingImage=a&backingImageDataSourceType=export-from-volume&volume-name=v&export-type=raw&image-id=" + id: id,
	} {
		h, err := backing.ParseHandle(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Preparable(); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), names) {
			t.Errorf("%s: got %v", text, err)
		}
	}
}

// FuzzParseHandle holds what the parser accepts to being written and read again without a difference.
func FuzzParseHandle(f *testing.F) {
	f.Add("bi://backing?backingImageDataSourceType=download&backingImage=a&url=http%3A%2F%2Fh%2Fp%3Fx%3D1&backingImageChecksum=" + sum)
	f.Add("bi://backing?backingImageDataSourceType=export-from-volume&backingImage=%C3%BC+%26&volume-name=v&export-type=qcow2")
	f.Add("bi://backing?backingImage=a;url=b#c")
	f.Fuzz(func(t *testing.T, text string) {
		h, err := backing.ParseHandle(text)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) || h != (backing.Handle{}) {
				t.Fatalf("%v with %v", err, h)
			}
			return
		}
		again, err := backing.ParseHandle(h.String())
		if err != nil && len(h.String()) <= backing.MaxHandle || err == nil && again != h {
			t.Fatalf("%#v was written as %q and read as %#v, %v", h, h, again, err)
		}
		if h.Public() != h.Public().Public() {
			t.Fatalf("the public handle of %#v changes", h)
		}
	})
}

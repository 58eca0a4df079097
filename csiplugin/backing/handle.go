package backing

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
)

// Scheme is what the handles of backing images begin with; the ids of all other objects do not.
const Scheme = "bi://"

const prefix = Scheme + "backing?"

// MaxHandle is how many bytes a handle may have. CSI allows 128 for an id; Longhorn's handles with a URL in them are longer,
// and Kubernetes passes them on.
const MaxHandle = 8 << 10

// maxPublic is how many bytes a handle may have without the query of its URL: it is kept with the data.
const maxPublic = 1536

// maxName is how many bytes the name of an image, or of a volume, may have (CSI, Size Limits).
const maxName = 128

// Source is where an image comes from.
type Source string

// The sources. Longhorn has more, which cannot be asked for in a handle there either.
const (
	Download Source = "download"
	Export   Source = "export-from-volume"
)

// Format is what an image's file is. It is declared and never found out by looking.
type Format string

// The formats.
const (
	Raw   Format = "raw"
	QCOW2 Format = "qcow2"
)

// ParseFormat reads a format. Errors are ErrInvalidArgument.
func ParseFormat(s string) (Format, error) {
	if f := Format(s); f == Raw || f == QCOW2 {
		return f, nil
	}
	return "", fmt.Errorf("%.32q; want %s or %s: %w", s, Raw, QCOW2, errdefs.ErrInvalidArgument)
}

// The keys of a handle. The aliases are Longhorn's: its text says checksum, its code takes exportType.
const (
	keyImage    = "backingImage"
	keySource   = "backingImageDataSourceType"
	keyChecksum = "backingImageChecksum"
	keyURL      = "url"
	keyVolume   = "volume-name"
	keyFormat   = "export-type"
	keyID       = "image-id"
)

var aliases = map[string]string{"checksum": keyChecksum, "exportType": keyFormat}

// Handle is what the handle of a backing image says. Handles can be compared with ==.
type Handle struct {
	// Image is the image's name.
	Image string
	// Source is where it comes from.
	Source Source
	// Checksum is the SHA-512 of the image's file in lower-case hexadecimal digits, or empty.
	Checksum string
	// URL is where to download from, http or https. It may hold what gives access: see [Handle.Public].
	URL string
	// Volume is the id or the name of the volume to export.
	Volume string
	// Format is that of the export, or of what is downloaded; empty if it is not said.
	Format Format
	// ID is the identity of one image, so that another one that later has its name is not taken for it. This driver adds it to
	// the handles of snapshots that it has made. Such a handle never has anything prepared.
	ID string
}

// IsHandle reports whether an id is meant as the handle of a backing image.
func IsHandle(id string) bool { return strings.HasPrefix(id, Scheme) }

// ForeignScheme is ErrInvalidArgument for the id of a snapshot that is a handle of some other driver: it begins with a scheme, and
// not with ours.
func ForeignScheme(id string) error {
	if scheme, _, found := strings.Cut(id, "://"); found && !IsHandle(id) {
		return fmt.Errorf("snapshot_id begins with %.16q; this driver has ids without, and %s: %w", scheme+"://", Scheme, errdefs.ErrInvalidArgument)
	}
	return nil
}

// ParseHandle reads a handle. It is strict: whatever is not understood would otherwise be lost in silence. Errors are
// ErrInvalidArgument; they name the key and never show a URL.
func ParseHandle(s string) (Handle, error) {
	h, err := parse(s)
	if err != nil {
		return Handle{}, fmt.Errorf("handle of a backing image: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return h, nil
}

func parse(s string) (Handle, error) {
	query, ok := strings.CutPrefix(s, prefix)
	switch {
	case len(s) > MaxHandle:
		return Handle{}, fmt.Errorf("it has %d bytes, %d are allowed", len(s), MaxHandle)
	case !ok && strings.Contains(s, "@"):
		return Handle{}, fmt.Errorf("userinfo is not allowed; want %s", prefix)
	case !ok:
		return Handle{}, fmt.Errorf("it does not begin with %s", prefix)
	case strings.Contains(query, "#"):
		return Handle{}, fmt.Errorf("a fragment is not allowed; write %%23 for # in a value")
	}
	values := map[string]string{}
	for pair := range strings.SplitSeq(query, "&") {
		key, value, err := parsePair(pair)
		if err != nil {
			return Handle{}, err
		}
		if _, twice := values[key]; twice {
			return Handle{}, fmt.Errorf("%s is there twice", key)
		}
		values[key] = value
	}
	return fromValues(values)
}

// parsePair reads key=value; the key that comes back is no alias.
func parsePair(pair string) (key, value string, err error) {
	rawKey, rawValue, ok := strings.Cut(pair, "=")
	if key, err = url.QueryUnescape(rawKey); err != nil || !utf8.ValidString(key) {
		return "", "", fmt.Errorf("key %.64q is escaped wrongly", rawKey)
	}
	if name, alias := aliases[key]; alias {
		key = name
	}
	if !slices.Contains(keys, key) {
		return "", "", fmt.Errorf("key %.64q is not known; there are %s (if it belongs to the URL, write %%26 for & there)", key, strings.Join(keys, ", "))
	}
	if !ok || rawValue == "" {
		return "", "", fmt.Errorf("%s has no value", key)
	}
	value, err = url.QueryUnescape(rawValue)
	switch {
	case err != nil || !utf8.ValidString(value):
		return "", "", fmt.Errorf("%s is escaped wrongly", key)
	case strings.Contains(rawValue, ";"):
		return "", "", fmt.Errorf("%s has a semicolon in it; write %%3B", key)
	case strings.ContainsFunc(value, unicode.IsControl):
		return "", "", fmt.Errorf("%s has a control character in it", key)
	}
	return key, value, nil
}

var keys = []string{keyImage, keySource, keyChecksum, keyURL, keyVolume, keyFormat, keyID}

var (
	sha512Text = regexp.MustCompile(`^[0-9a-fA-F]{128}$`)
	imageID    = regexp.MustCompile(`^[0-9a-f]{12}-img-[0-9a-f]{32}$`)
)

func fromValues(values map[string]string) (Handle, error) {
	h := Handle{
		Image: values[keyImage], Source: Source(values[keySource]), Checksum: strings.ToLower(values[keyChecksum]),
		URL: values[keyURL], Volume: values[keyVolume], ID: values[keyID],
	}
	foreign := map[Source]string{Download: keyVolume, Export: keyURL}[h.Source]
	switch _, there := values[foreign]; {
	case h.Image == "":
		return h, fmt.Errorf("%s is missing", keyImage)
	case len(h.Image) > maxName:
		return h, fmt.Errorf("%s has %d bytes, %d are allowed", keyImage, len(h.Image), maxName)
	case h.Source == "":
		return h, fmt.Errorf("%s is missing", keySource)
	case foreign == "":
		return h, fmt.Errorf("%s is %.64q; want %s or %s", keySource, h.Source, Download, Export)
	case there:
		return h, fmt.Errorf("%s does not go with %s=%s", foreign, keySource, h.Source)
	case h.Checksum != "" && !sha512Text.MatchString(h.Checksum):
		return h, fmt.Errorf("%s: want a SHA-512, 128 hexadecimal digits", keyChecksum)
	case len(h.Volume) > maxName:
		return h, fmt.Errorf("%s has %d bytes, %d are allowed", keyVolume, len(h.Volume), maxName)
	case h.ID != "" && !imageID.MatchString(h.ID):
		return h, fmt.Errorf("%s is not one that this driver gives", keyID)
	}
	if format, there := values[keyFormat]; there {
		var err error
		if h.Format, err = ParseFormat(format); err != nil {
			return h, fmt.Errorf("%s is %w", keyFormat, err)
		}
	}
	if h.URL != "" {
		if err := checkURL(h.URL); err != nil {
			return h, err
		}
	}
	if n := len(h.Public().String()); n > maxPublic {
		return h, fmt.Errorf("it has %d bytes without the URL's query, %d are allowed", n, maxPublic)
	}
	return h, nil
}

// checkURL says what is wrong with a URL without showing it.
func checkURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return fmt.Errorf("%s is no URL", keyURL)
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("%s has the scheme %.16q; want http or https", keyURL, u.Scheme)
	case u.User != nil:
		return fmt.Errorf("%s has userinfo in it: it would be readable by everybody who can read the snapshot", keyURL)
	case u.Hostname() == "" || u.Opaque != "":
		return fmt.Errorf("%s names no host", keyURL)
	case strings.Contains(text, "#"):
		return fmt.Errorf("%s has a fragment, which no server gets to see", keyURL)
	}
	return nil
}

// String writes the handle with its keys in a fixed order and everything escaped. What it writes, [ParseHandle] reads as h.
func (h Handle) String() string {
	values := map[string]string{
		keyImage: h.Image, keySource: string(h.Source), keyChecksum: h.Checksum, keyURL: h.URL, keyVolume: h.Volume,
		keyFormat: string(h.Format), keyID: h.ID,
	}
	maps.DeleteFunc(values, func(_, value string) bool { return value == "" })
	var pairs []string
	for _, key := range keys {
		if value, there := values[key]; there {
			pairs = append(pairs, key+"="+url.QueryEscape(value))
		}
	}
	return prefix + strings.Join(pairs, "&")
}

// Public is the handle with the query of its URL replaced by a digest of that: it can be kept and shown, and two handles are
// the same if their public handles are.
func (h Handle) Public() Handle {
	h.URL = PublicURL(h.URL)
	return h
}

// PublicURL is a URL that can be shown: its query, which may be what gives access to it, is replaced by a digest of it. A
// public URL stays as it is.
func PublicURL(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.RawQuery == "" || isDigest(u.RawQuery) {
		return text
	}
	sum := sha256.Sum256([]byte(u.RawQuery))
	u.RawQuery = digestPrefix + hex.EncodeToString(sum[:16])
	return u.String()
}

const digestPrefix = "query-digest="

func isDigest(query string) bool {
	digest, ok := strings.CutPrefix(query, digestPrefix)
	return ok && len(digest) == 32 && strings.Trim(digest, "0123456789abcdef") == ""
}

// Preparable returns nil if the handle says all that it takes to make the image, and else an error that says what is missing:
// ErrNotFound, because then the handle only refers to an image, which does not exist.
func (h Handle) Preparable() error {
	missing := ""
	switch {
	case h.ID != "":
		return fmt.Errorf("image %q (%s) does not exist any more: %w", h.Image, h.ID, errdefs.ErrNotFound)
	case h.Source == Download && h.URL == "":
		missing = keyURL
	case h.Source == Export && h.Volume == "":
		missing = keyVolume
	case h.Source == Export && h.Format == "":
		missing = keyFormat
	default:
		return nil
	}
	return fmt.Errorf("image %q does not exist, and its handle has no %s to prepare it from: %w", h.Image, missing, errdefs.ErrNotFound)
}

// Declared is the format in which the image comes: what the handle says, or else for a download what the name in the URL
// says. Anything but ".qcow2" at its end is raw.
func (h Handle) Declared() Format {
	if h.Format != "" {
		return h.Format
	}
	if u, err := url.Parse(h.URL); err == nil && strings.HasSuffix(strings.ToLower(u.Path), ".qcow2") {
		return QCOW2
	}
	return Raw
}

package configfile

import (
	"reflect"
	"slices"

	"go.yaml.in/yaml/v4"
)

// Changes returns the top-level keys under which two files say different things, sorted. Comments, order and spelling
// make no difference.
func Changes(before, after *File) []string {
	var keys []string
	a, b := reflect.ValueOf(before).Elem(), reflect.ValueOf(after).Elem()
	for i := range a.NumField() {
		key := a.Type().Field(i).Tag.Get("yaml")
		switch key {
		case "", "apiVersion", "kind":
			continue
		case "handlers":
			if !slices.EqualFunc(before.Handlers, after.Handlers, Handler.equal) {
				keys = append(keys, key)
			}
			continue
		}
		if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

func (h Handler) equal(other Handler) bool {
	return h.Kind == other.Kind && h.Name == other.Name && sameNode(h.settings, other.settings)
}

// sameNode says whether two trees have the same values. The order of keys counts: that a restart is asked for once too
// often does no harm.
func sameNode(a, b *yaml.Node) bool {
	return a.Kind == b.Kind && a.Value == b.Value && a.ShortTag() == b.ShortTag() && slices.EqualFunc(a.Content, b.Content, sameNode)
}

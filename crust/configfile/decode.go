package configfile

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
)

// parse turns text into a tree.
func (s source) parse(text []byte) (*yaml.Node, error) {
	var doc yaml.Node
	err := yaml.Load(text, &doc)
	var count *yaml.LoadErrors
	var syntax *yaml.LoadError
	switch {
	case err == nil && doc.Kind == yaml.DocumentNode && len(doc.Content) == 1:
		return doc.Content[0], nil
	case doc.Kind == 0 && (err == nil || errors.As(err, &count)):
		return nil, s.at(0, "the file is empty; docs/configuration.md has an example")
	case errors.As(err, &count):
		return nil, s.at(0, "there is more than one YAML document in the file; put everything into one")
	case errors.As(err, &syntax):
		return nil, s.at(syntax.Mark.Line, "this is not YAML: "+cmp.Or(syntax.Message, syntax.Error()))
	}
	return nil, s.at(0, fmt.Sprintf("this is not YAML: %v", err))
}

// decoder puts a tree into structs of which each field has a key in its yaml tag. It notes where each value is.
type decoder struct {
	source
	errs []error
}

func (d *decoder) fail(n *yaml.Node, format string, args ...any) {
	d.errs = append(d.errs, d.at(n.Line, fmt.Sprintf(format, args...)))
}

// err is all errors in the order of their lines.
func (d *decoder) err() error {
	slices.SortStableFunc(d.errs, func(a, b error) int {
		var x, y *Error
		if !errors.As(a, &x) || !errors.As(b, &y) {
			return 0
		}
		return cmp.Compare(x.Line, y.Line)
	})
	return errors.Join(d.errs...)
}

// decode fills the struct that into points to.
func (d *decoder) decode(n *yaml.Node, into any, path string) {
	d.value(n, reflect.ValueOf(into).Elem(), path)
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	handlerType  = reflect.TypeFor[Handler]()
)

func (d *decoder) value(n *yaml.Node, v reflect.Value, path string) {
	d.lines[path] = n.Line
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		d.fail(n, "%s: anchors and aliases are not supported; write the value twice", cmp.Or(path, "the file"))
		return
	}
	if n.ShortTag() == "!!null" {
		d.fail(n, "%s has no value; take the key out, or give it one ({} or [] if it is to be empty)", cmp.Or(path, "the file"))
		return
	}
	switch {
	case v.Type() == handlerType:
		d.handler(n, v.Addr().Interface().(*Handler), path)
	case v.Type() == durationType:
		if text, ok := d.scalar(n, path, "a duration such as 10s"); ok {
			parsed, err := time.ParseDuration(text)
			if err != nil || parsed <= 0 {
				d.fail(n, "%s: %q is not a positive duration such as 10s or 1m30s", path, text)
			}
			v.SetInt(int64(parsed))
		}
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem(), path)
	case v.Kind() == reflect.Struct:
		d.structure(n, v, path)
	case v.Kind() == reflect.Slice:
		d.slice(n, v, path)
	case v.Kind() == reflect.Map:
		d.texts(n, v, path)
	case v.Kind() == reflect.Bool:
		if text, ok := d.scalar(n, path, "true or false"); ok {
			if text != "true" && text != "false" {
				d.fail(n, "%s: want true or false, not %q", path, text)
			}
			v.SetBool(text == "true")
		}
	case v.Kind() == reflect.String:
		if text, ok := d.scalar(n, path, "a text"); ok {
			v.SetString(text)
		}
	default:
		panic("configfile: no way to read a " + v.Type().String()) // the types are ours
	}
}

func (d *decoder) scalar(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		d.fail(n, "%s: want %s, not %s", path, want, kindOf(n))
		return "", false
	}
	return n.Value, true
}

func (d *decoder) slice(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.SequenceNode {
		d.fail(n, "%s: want a list, not %s; put \"- \" before each item", path, kindOf(n))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		d.value(item, v.Index(i), fmt.Sprintf("%s[%d]", path, i))
	}
}

// texts reads a map of texts.
func (d *decoder) texts(n *yaml.Node, v reflect.Value, path string) {
	v.Set(reflect.MakeMap(v.Type()))
	d.pairs(n, path, func(key, value *yaml.Node) {
		text := reflect.New(v.Type().Elem()).Elem()
		d.value(value, text, path+"."+key.Value)
		v.SetMapIndex(reflect.ValueOf(key.Value), text)
	})
}

func (d *decoder) structure(n *yaml.Node, v reflect.Value, path string) {
	fields := map[string]reflect.Value{}
	var names []string
	for i := range v.NumField() {
		if name := v.Type().Field(i).Tag.Get("yaml"); name != "" {
			fields[name] = v.Field(i)
			names = append(names, name)
		}
	}
	prefix := path
	if prefix != "" {
		prefix += "."
	}
	d.pairs(n, path, func(key, value *yaml.Node) {
		field, ok := fields[key.Value]
		if !ok {
			d.fail(key, "unknown key %q%s", prefix+key.Value, suggestion(key.Value, names))
			return
		}
		d.value(value, field, prefix+key.Value)
	})
}

// pairs calls fn for each key of a mapping and its value.
func (d *decoder) pairs(n *yaml.Node, path string, fn func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		d.fail(n, "%s: want keys with values, not %s", cmp.Or(path, "the file"), kindOf(n))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		switch {
		case key.Kind != yaml.ScalarNode || key.Anchor != "":
			d.fail(key, "%s: a key must be a plain text", cmp.Or(path, "the file"))
		case seen[key.Value] > 0:
			d.fail(key, "key %q is here a second time; the first is in line %d", key.Value, seen[key.Value])
		default:
			seen[key.Value] = key.Line
			fn(key, n.Content[i+1])
		}
	}
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys with values"
	case yaml.SequenceNode:
		return "a list"
	}
	return fmt.Sprintf("%q", n.Value)
}

// suggestion says which of the names was probably meant.
func suggestion(unknown string, names []string) string {
	if len(names) == 0 {
		return "; there are no settings"
	}
	best := slices.MinFunc(names, func(a, b string) int { return cmp.Compare(distance(unknown, a), distance(unknown, b)) })
	if distance(unknown, best) <= max(2, len(best)/3) {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	slices.Sort(names)
	return "; there is " + strings.Join(names, ", ")
}

// distance is how many letters have to be changed, added or taken out to make one word of another, in whatever case.
func distance(a, b string) int {
	a, b = strings.ToLower(a), strings.ToLower(b)
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

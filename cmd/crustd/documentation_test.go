package main

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/configfile"
)

func documentation(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestDocumentedExample: the example works, and has every key that there is.
func TestDocumentedExample(t *testing.T) {
	text := documentation(t)
	_, example, ok := strings.Cut(text, "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	if !ok || example == "" {
		t.Fatal("there is no example")
	}
	config, err := load(t, example)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := crust.New(config); err != nil {
		t.Fatal(err)
	}
	file, err := configfile.Parse("example", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys() {
		found := false
		for _, i := range []string{"0", "1", "2"} {
			found = found || file.Has(strings.Replace(key, "[]", "["+i+"]", 1)) || strings.HasPrefix(key, "handlers[].")
		}
		if last := key[strings.LastIndex(key, ".")+1:]; !found || !strings.Contains(example, last+":") {
			t.Errorf("the example has no %s", key)
		}
	}
}

// TestEveryKeyIsDocumented, and nothing else is.
func TestEveryKeyIsDocumented(t *testing.T) {
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(documentation(t), -1) {
		documented = append(documented, m[1])
	}
	slices.Sort(documented)
	documented = slices.Compact(documented) // two kinds of handlers have a root
	if diff := cmp.Diff(keys(), documented); diff != "" {
		t.Errorf("-there is +is documented\n%s", diff)
	}
}

// TestEveryFlagIsDocumented, with its default.
func TestEveryFlagIsDocumented(t *testing.T) {
	text := documentation(t)
	newCommand().Flags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(text, "--"+f.Name) {
			t.Errorf("--%s is not documented", f.Name)
		}
		line := regexp.MustCompile("(?m)^.*`--" + f.Name + "`.*$").FindString(text)
		if f.DefValue != "" && line != "" && strings.HasPrefix(line, "|") && !strings.Contains(line, "`"+f.DefValue+"`") {
			t.Errorf("--%s: its default %s is not in\n%s", f.Name, f.DefValue, line)
		}
	})
}

// keys are the keys of the file, sorted, as the documentation writes them.
func keys() []string {
	var list []string
	var add func(prefix string, of reflect.Type)
	add = func(prefix string, of reflect.Type) {
		for of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		for i := range of.NumField() {
			field := of.Field(i)
			key := field.Tag.Get("yaml")
			if key == "" || key == "apiVersion" || prefix == "" && key == "kind" {
				continue
			}
			element := field.Type
			if element.Kind() == reflect.Pointer {
				element = element.Elem()
			}
			switch {
			case element.Kind() == reflect.Slice && element.Elem().Kind() == reflect.Struct:
				list = append(list, prefix+key)
				add(prefix+key+"[].", element.Elem())
			case element.Kind() == reflect.Struct && element != reflect.TypeFor[time.Duration]():
				if field.Type.Kind() == reflect.Pointer {
					list = append(list, prefix+key)
				}
				add(prefix+key+".", element)
			default:
				list = append(list, prefix+key)
			}
		}
	}
	add("", reflect.TypeFor[configfile.File]())
	add("handlers[].", reflect.TypeFor[cliSettings]())
	add("handlers[].", reflect.TypeFor[kataSettings]())
	list = append(list, "handlers[].kind", "handlers[].name")
	slices.Sort(list)
	return slices.Compact(list)
}

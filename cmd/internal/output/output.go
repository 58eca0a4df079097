// Package output prints what a command has found: as a table for people, as JSON or YAML for machines. The names of
// fields are the same in JSON and YAML and are part of a command's interface; tables are not.
//
//	var format output.Format
//	format.Flag(cmd)
//	...
//	return format.Print(cmd.OutOrStdout(), answer, output.List(answer.GetThings(), "There are no things.",
//		output.Column[*v1.Thing]{Header: "NAME", Cell: (*v1.Thing).GetName},
//		output.Column[*v1.Thing]{Header: "SIZE", Cell: func(t *v1.Thing) string { return output.Bytes(t.GetSizeBytes()) }},
//		output.Column[*v1.Thing]{Header: "PATH", Cell: (*v1.Thing).GetPath, Wide: true},
//	))
package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Format is how to print. The zero value is Table. It is a flag (pflag.Value).
type Format string

// The formats. Wide is a table with all its columns.
const (
	Table Format = "table"
	Wide  Format = "wide"
	JSON  Format = "json"
	YAML  Format = "yaml"
)

var formats = []string{string(Table), string(Wide), string(JSON), string(YAML)}

// Flag adds --output, or -o, to a command and all beneath it.
func (f *Format) Flag(cmd *cobra.Command) {
	cmd.PersistentFlags().VarP(f, "output", "o", strings.Join(formats, ", "))
	err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // the flag is declared above
	}
}

// String is for pflag.Value.
func (f *Format) String() string {
	if *f == "" {
		return string(Table)
	}
	return string(*f)
}

// Set is for pflag.Value.
func (f *Format) Set(text string) error {
	if !slices.Contains(formats, text) {
		return fmt.Errorf("want one of %s", strings.Join(formats, ", "))
	}
	*f = Format(text)
	return nil
}

// Type is for pflag.Value.
func (f *Format) Type() string { return "format" }

// Print writes value as JSON or YAML, or else view. value is a protobuf message, of which all fields but unset messages
// are printed under their names in the .proto file, or something that encoding/json takes.
func (f Format) Print(w io.Writer, value any, view View) error {
	if f != JSON && f != YAML {
		return view(w, f == Wide)
	}
	text, err := toJSON(value)
	if err != nil {
		return fmt.Errorf("print as %s: %w", f, err)
	}
	if f == YAML {
		if text, err = toYAML(text); err != nil {
			return fmt.Errorf("print as %s: %w", f, err)
		}
	}
	_, err = w.Write(text)
	return err
}

// toJSON returns indented JSON that ends in a line feed.
func toJSON(value any) ([]byte, error) {
	var raw []byte
	var err error
	if m, ok := value.(proto.Message); ok {
		raw, err = protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
	} else {
		raw, err = json.Marshal(value)
	}
	if err != nil {
		return nil, err
	}
	// protojson varies its white space on purpose.
	var text bytes.Buffer
	if err := json.Indent(&text, raw, "", "  "); err != nil {
		return nil, err
	}
	text.WriteByte('\n')
	return text.Bytes(), nil
}

// toYAML writes JSON, which is YAML already, in the way that people write YAML. The order of the fields stays.
func toYAML(text []byte) ([]byte, error) {
	var doc yaml.Node
	if err := yaml.Load(text, &doc); err != nil {
		return nil, err
	}
	plain(&doc)
	return yaml.Dump(&doc)
}

// plain takes the quotes and braces off a tree; the encoder puts back those that are needed.
func plain(n *yaml.Node) {
	if len(n.Content) > 0 || n.Kind == yaml.ScalarNode {
		n.Style = 0
	}
	for _, child := range n.Content {
		plain(child)
	}
}

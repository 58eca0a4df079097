package output_test

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v4"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

var answer = &adminv1.ReconcileResponse{Findings: []*adminv1.Finding{{Kind: "left", Path: "/a", VolumeId: "7", Text: "is in use"}, {Path: "/b"}}}

func view() output.View {
	return output.List(answer.GetFindings(), "There are none.",
		output.Column[*adminv1.Finding]{Header: "KIND", Cell: (*adminv1.Finding).GetKind},
		output.Column[*adminv1.Finding]{Header: "VOLUME", Cell: (*adminv1.Finding).GetVolumeId, Wide: true},
		output.Column[*adminv1.Finding]{Header: "PATH", Cell: (*adminv1.Finding).GetPath})
}

func TestPrint(t *testing.T) {
	for format, want := range map[output.Format]string{
		output.Table: `KIND  PATH
left  /a
-     /b
`,
		output.Wide: `KIND  VOLUME  PATH
left  7       /a
-     -       /b
`,
		output.JSON: `{
  "findings": [
    {
      "kind": "left",
      "path": "/a",
      "volume_id": "7",
      "text": "is in use"
    },
    {
      "kind": "",
      "path": "/b",
      "volume_id": "",
      "text": ""
    }
  ]
}
`,
		output.YAML: `findings:
- kind: left
  path: /a
  volume_id: '7'
  text: is in use
- kind: ''
  path: /b
  volume_id: ''
  text: ''
`,
	} {
		var b strings.Builder
		if err := format.Print(&b, answer, view()); err != nil {
			t.Errorf("%s: %v", format, err)
		}
		if diff := cmp.Diff(want, b.String()); diff != "" {
			t.Errorf("%s: -want +got\n%s", format, diff)
		}
	}
}

func TestViews(t *testing.T) {
	var b strings.Builder
	err := output.Views(
		output.Fields(output.Field{Name: "Name", Value: "x"}, output.Field{Name: "Nothing"}, output.Field{Name: "Long name", Value: "a\x1b[31m\tb\n"}),
		output.Titled("Rest", output.List([]string{}, "There is none.")),
	)(&b, false)
	want := "Name:       x\nLong name:  a\\x1b[31m\\tb\\n\n\nRest:\nThere is none.\n"
	if err != nil || b.String() != want {
		t.Errorf("%v\n%q, want\n%q", err, b.String(), want)
	}
}

func TestFormatFlag(t *testing.T) {
	run := func(args ...string) (output.Format, error) {
		var format output.Format
		cmd := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }, SilenceErrors: true, SilenceUsage: true}
		format.Flag(cmd)
		cmd.SetArgs(args)
		cmd.SetOut(io.Discard)
		return format, cmd.Execute()
	}
	if format, err := run("-o", "yaml"); err != nil || format != output.YAML {
		t.Errorf("%q, %v", format, err)
	}
	if _, err := run("-o", "xml"); err == nil || !strings.Contains(err.Error(), "want one of table, wide, json, yaml") {
		t.Errorf("error %v", err)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 1023: "1023", 1024: "1Ki", 1536: "1.5Ki", 512 << 20: "512Mi", 1 << 60: "1Ei", -1: "-1"} {
		if got := output.Bytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestAge(t *testing.T) {
	const day = 24 * time.Hour
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 119 * time.Second: "119s", 2 * time.Minute: "2m", 179 * time.Minute: "179m",
		3 * time.Hour: "3h", 3*time.Hour + 20*time.Minute: "3h20m", day: "1d", 2*day + 5*time.Hour: "2d5h", 40 * day: "40d",
	} {
		if got := output.Age(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}

// FuzzYAML: YAML says the same as JSON, whatever is in it.
func FuzzYAML(f *testing.F) {
	for _, s := range []string{"", "1", "true", "null", "a: b", "- x", "é\u2028", "\x00\x1b", "  lead", "line\nfeed\n", "~", "0x10", "2001-01-01", "#", "<<", "=", "\ufeff"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		in := map[string]any{"k" + key: value, "list": []any{value, map[string]any{"x": value}}, "none": nil, "yes": true}
		text := print(t, output.JSON, in)
		var want, got any
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(err)
		}
		text = print(t, output.YAML, in)
		if err := yaml.Unmarshal([]byte(text), &got); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got\n%s\n%s", diff, text)
		}
	})
}

func print(t *testing.T, format output.Format, value any) string {
	t.Helper()
	var b strings.Builder
	if err := format.Print(&b, value, nil); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

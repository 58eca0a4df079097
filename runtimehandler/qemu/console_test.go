package qemu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestConsoleIsBounded(t *testing.T) {
	dir := t.TempDir()
	l, err := openConsole(dir)
	if err != nil {
		t.Fatal(err)
	}
	chunk := []byte(strings.Repeat("x", 10_000) + "\n")
	for range 300 {
		l.write(chunk)
	}
	l.write([]byte("the end\n"))
	l.close()
	l.write([]byte("after the end\n"))
	total := int64(0)
	for _, name := range []string{consoleName, consoleBefore} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
		total += info.Size()
	}
	if total > 2*maxConsole {
		t.Errorf("3 MB of console take %d bytes", total)
	}
	raw, err := os.ReadFile(filepath.Join(dir, consoleName))
	if err != nil || !strings.HasSuffix(string(raw), "the end\n") {
		t.Errorf("the log ends with %q, %v", raw[max(0, len(raw)-20):], err)
	}
	if last := l.last(); len(last) > maxTail || !strings.HasSuffix(last, "after the end\n") {
		t.Errorf("the end in memory is %q", last[max(0, len(last)-20):])
	}
}

// TestConsoleWithoutDisk: a console that cannot be written must not stop the guest.
func TestConsoleWithoutDisk(t *testing.T) {
	l, err := openConsole(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := l.file.Close(); err != nil {
		t.Fatal(err)
	}
	l.copyFrom(strings.NewReader("one\ntwo\n"))
	if got := l.last(); got != "one\ntwo\n" {
		t.Errorf("%q", got)
	}
	l.close()
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain\n\ttext":            "plain\n\ttext",
		"\x1b[31mred\x1b[0m":       "red",
		"\x1b[2J\x1b[1;1Hcleared":  "cleared",
		"\x1b]0;title\abody":       "body",
		"a\r\nb\x00c\x07d\x7fe":    "a\nbcde",
		"\x1bcreset":               "reset",
		"\xff\xfe":                 "?",
		"\u009b31m, C1 control":    "31m, C1 control",
		"unfinished \x1b[":         "unfinished ",
		"grün":                     "grün",
		"\x1b[31\nnever finished":  "\nnever finished",
		"\x1b(Bcharset \x1b)0line": "charset line",
	} {
		if got := Printable(text); got != want {
			t.Errorf("Printable(%q) = %q, want %q", text, got, want)
		}
	}
}

// FuzzPrintable: what is shown to a person is text, and has nothing that a terminal obeys.
func FuzzPrintable(f *testing.F) {
	f.Add("\x1b[31mx")
	f.Add("\x1b]8;;http://x\a")
	f.Fuzz(func(t *testing.T, text string) {
		got := Printable(text)
		if !utf8.ValidString(got) {
			t.Errorf("%q is no text", got)
		}
		for _, r := range got {
			if r != '\n' && r != '\t' && unicode.IsControl(r) {
				t.Errorf("%q has %q", got, r)
			}
		}
	})
}

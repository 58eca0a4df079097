package output

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// View prints something for people; wide asks for everything.
type View func(w io.Writer, wide bool) error

// Column is one column of a list.
type Column[T any] struct {
	Header string
	Cell   func(T) string
	// Wide shows the column only in wide tables.
	Wide bool
}

// List is a table with a row for each of rows, or the sentence empty if there are none.
func List[T any](rows []T, empty string, columns ...Column[T]) View {
	return func(w io.Writer, wide bool) error {
		if len(rows) == 0 {
			_, err := fmt.Fprintln(w, empty)
			return err
		}
		t := newTable(w)
		line := make([]string, 0, len(columns))
		for i := -1; i < len(rows); i++ {
			line = line[:0]
			for _, c := range columns {
				switch {
				case c.Wide && !wide:
				case i < 0:
					line = append(line, c.Header)
				default:
					line = append(line, cell(c.Cell(rows[i])))
				}
			}
			fmt.Fprintln(t, strings.Join(line, "\t"))
		}
		return t.Flush()
	}
}

// Field is a line of a description.
type Field struct {
	Name  string
	Value string
}

// Fields is a description: a line for each field. Fields without a value are left out.
func Fields(fields ...Field) View {
	return func(w io.Writer, _ bool) error {
		t := newTable(w)
		for _, f := range fields {
			if f.Value != "" {
				fmt.Fprintf(t, "%s:\t%s\n", f.Name, cell(f.Value))
			}
		}
		return t.Flush()
	}
}

// Views prints one view after another, with an empty line between two.
func Views(views ...View) View {
	return func(w io.Writer, wide bool) error {
		for i, v := range views {
			if i > 0 {
				if _, err := fmt.Fprintln(w); err != nil {
					return err
				}
			}
			if err := v(w, wide); err != nil {
				return err
			}
		}
		return nil
	}
}

// Titled is a view beneath a title.
func Titled(title string, view View) View {
	return func(w io.Writer, wide bool) error {
		if _, err := fmt.Fprintln(w, title+":"); err != nil {
			return err
		}
		return view(w, wide)
	}
}

func newTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

// cell makes a text safe for a table and for a terminal: some come from guests.
func cell(text string) string {
	if text == "" {
		return "-"
	}
	return Printable(text)
}

// Printable returns a text with whatever could move the cursor, colour the terminal or end the line written as Go
// writes it in a string.
func Printable(text string) string {
	if strings.IndexFunc(text, unprintable) < 0 {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if unprintable(r) {
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// Bytes writes a number of bytes with a binary unit: "512Mi", "1.5Gi"; 0 is "0".
func Bytes(n int64) string {
	if n < 0 {
		return strconv.FormatInt(n, 10)
	}
	value, unit := float64(n), 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	return strings.TrimSuffix(strconv.FormatFloat(value, 'f', 1, 64), ".0") + units[unit]
}

var units = []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"}

// Age writes a duration for people, in the largest unit or two that say something: "45s", "12m", "3h20m", "2d4h", "40d".
func Age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 3*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 24*time.Hour:
		return pair(d, time.Hour, "h", time.Minute, "m")
	case d < 8*24*time.Hour:
		return pair(d, 24*time.Hour, "d", time.Hour, "h")
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

func pair(d, large time.Duration, largeName string, small time.Duration, smallName string) string {
	text := fmt.Sprintf("%d%s", d/large, largeName)
	if rest := d % large / small; rest > 0 {
		text += fmt.Sprintf("%d%s", rest, smallName)
	}
	return text
}

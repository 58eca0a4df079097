// Package docs reads what documents tell people to run and to apply, so that tests can do it.
package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Documents are those of which every command and every object is tested.
var Documents = []string{"install.md", "day-2.md", "troubleshooting.md"}

// Block is a fenced part of a document.
type Block struct {
	// Document is the name of the file.
	Document string
	// Info is what is behind the fence: "sh" for commands, "yaml" for objects, ...
	Info string
	Text string
}

var fence = regexp.MustCompile("(?ms)^ *```([a-z][a-z ]*)\n(.*?)^ *```$")

// Blocks reads the documents in a directory. A block that does not say what it is is an error.
func Blocks(dir string) (list []Block, err error) {
	for _, name := range Documents {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		found := fence.FindAllStringSubmatch(string(raw), -1)
		for _, m := range found {
			list = append(list, Block{name, m[1], m[2]})
		}
		if n := strings.Count(string(raw), "```"); n != 2*len(found) {
			return nil, fmt.Errorf("%s has blocks that say nothing of their kind", name)
		}
	}
	return list, nil
}

// Commands are the lines of the blocks with commands, each once.
func Commands(blocks []Block) (list []string) {
	seen := map[string]bool{}
	for _, b := range blocks {
		if !b.IsCommands() {
			continue
		}
		for line := range strings.Lines(b.Text) {
			if line = strings.TrimSpace(line); line != "" && !seen[line] {
				seen[line] = true
				list = append(list, line)
			}
		}
	}
	return list
}

// IsCommands says whether a block has commands.
func (b Block) IsCommands() bool { return b.Info == "sh" || b.Info == "sh run" }

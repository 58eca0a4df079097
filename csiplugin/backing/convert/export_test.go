package convert

import (
	"context"
	"io"
)

// See runs a command in the child's place, with a file of the host at "/in" and another at a further path, and returns what it
// prints.
func (c *Converter) See(ctx context.Context, in, other, at string, argv ...string) (string, error) {
	var printed []byte
	o := order{Argv: argv, FileSize: 1 << 30, Binds: []bind{{in, inPath, false}, {other, at, true}}}
	path, err := tool()
	if err != nil {
		return "", err
	}
	if argv[0] != "qemu-img" {
		path = argv[0]
	}
	err = c.start(ctx, o, path, func(r io.Reader) { printed, _ = io.ReadAll(r) })
	return string(printed), err
}

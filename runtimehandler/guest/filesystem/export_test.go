package filesystem

import "crust.dev/crust/runtimehandler/guest/command"

// What the tests of this package look at from outside.
var (
	XFSBlocks    = xfsBlocks
	Regions      = regions
	FirstNonZero = firstNonZero
	KernelText   = kernelText
)

// Region is a part of a device.
type Region = region

// Bounds returns the beginning and the length of a region.
func (r region) Bounds() (start, length int64) { return r.start, r.length }

// Parse is the reading of blkid's answer.
func (f *Finding) Parse(code int, stdout, stderr string) error {
	return f.parse(command.Result{Argv: []string{"blkid"}, Code: code, Stdout: stdout, Stderr: stderr})
}

// Words are options in the form of a command line, by who understands them.
func (o Options) Words() (attributes uint64, generic, specific []string) {
	for _, p := range o.generic {
		generic = append(generic, p.String())
	}
	for _, p := range o.specific {
		specific = append(specific, p.String())
	}
	return o.attributes, generic, specific
}

// WithDefaults are the options with those that a type of filesystem always gets.
func (o Options) WithDefaults(fsType string) Options {
	k, err := kindOf(fsType)
	if err != nil {
		panic(err)
	}
	return o.withDefaults(k.options)
}
